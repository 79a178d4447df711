-- The pool that a sandbox is warm in (it has no owner then) or was taken from.
ALTER TABLE sandboxes ADD COLUMN pool TEXT;
-- Pools that clients made; those of the configuration are not stored.
CREATE TABLE pools (
    name    TEXT PRIMARY KEY,
    pool    TEXT NOT NULL,
    created INTEGER NOT NULL
) STRICT;
