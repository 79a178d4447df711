-- One row per sandbox, written before anything of it exists and removed after everything is gone.
-- Times are microseconds: since 1970 where they are shown to people, since the host's start
-- (CLOCK_BOOTTIME, valid together with boot_id) where they must not move with the wall clock.
CREATE TABLE sandboxes (
    id           TEXT PRIMARY KEY,
    owner        TEXT NOT NULL,
    origin       TEXT NOT NULL,
    spec         TEXT NOT NULL,
    labels       TEXT NOT NULL,
    notes        BLOB NOT NULL,
    phase        TEXT NOT NULL,
    phase_since  INTEGER NOT NULL,
    created      INTEGER NOT NULL,
    expires      INTEGER,
    expires_boot INTEGER,
    idle_timeout INTEGER,
    in_force     TEXT NOT NULL,
    entrypoint   TEXT,
    epoch        INTEGER NOT NULL,
    boot_id      TEXT NOT NULL
) STRICT;

-- Only hashes: a reader of this file cannot call the API.
CREATE TABLE api_keys (
    hash    BLOB PRIMARY KEY,
    owner   TEXT NOT NULL,
    created INTEGER NOT NULL
) STRICT;
