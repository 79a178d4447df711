-- The pool that a sandbox stands in, warm and with nobody as its owner, or was taken from.
ALTER TABLE sandboxes ADD COLUMN pool TEXT;
-- Pools that were made by clients; those of the configuration are written there.
CREATE TABLE pools (
    name    TEXT PRIMARY KEY,
    pool    TEXT NOT NULL,
    created INTEGER NOT NULL
) STRICT;
