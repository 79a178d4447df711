-- Volumes that outlive sandboxes. A row is written before its volume is made and removed after it
-- is gone; the rows of sandboxes say which volumes they use.
CREATE TABLE volumes (
    id       TEXT PRIMARY KEY,
    owner    TEXT NOT NULL,
    name     TEXT NOT NULL,
    size     INTEGER NOT NULL,
    kept     INTEGER NOT NULL,
    created  INTEGER NOT NULL,
    removing INTEGER NOT NULL DEFAULT 0,
    UNIQUE (owner, name)
) STRICT;
