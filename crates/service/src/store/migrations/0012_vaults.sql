-- The certificate authorities and credential vaults of sandboxes. Keys and values are sealed: only the egress process can
-- read them. A sandbox without a row has no credential proxy; one without a vault has none yet.
CREATE TABLE vaults (
    sandbox TEXT PRIMARY KEY,
    certificate TEXT NOT NULL,
    authority_key TEXT NOT NULL,
    vault TEXT
);
CREATE TRIGGER vault_of_deleted_sandbox AFTER DELETE ON sandboxes
BEGIN
    DELETE FROM vaults WHERE sandbox = OLD.id;
END;
