-- Names that clients chose. Each leads to one sandbox and is removed with it; when a successor
-- replaces the sandbox, the name leads to the successor from the moment its row exists.
CREATE TABLE keys (
    owner   TEXT NOT NULL,
    space   TEXT NOT NULL,
    name    TEXT NOT NULL,
    sandbox TEXT NOT NULL,
    PRIMARY KEY (owner, space, name)
) STRICT;
CREATE INDEX keys_by_sandbox ON keys (sandbox);
