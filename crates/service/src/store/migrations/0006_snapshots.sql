-- One row per snapshot, written before it is taken and removed after its files are gone. It
-- outlives the sandbox it was taken of.
CREATE TABLE snapshots (
    id      TEXT PRIMARY KEY,
    owner   TEXT NOT NULL,
    sandbox TEXT NOT NULL,
    name    TEXT,
    state   TEXT NOT NULL,
    message TEXT,
    created INTEGER NOT NULL,
    image   TEXT NOT NULL,
    size    INTEGER NOT NULL,
    disk    INTEGER NOT NULL
) STRICT;
