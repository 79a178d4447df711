-- The newest things that became of sandboxes. A copy for readers that come back after a restart;
-- the last ones before a crash may be missing.
CREATE TABLE events (
    id      INTEGER PRIMARY KEY,
    time    INTEGER NOT NULL,
    owner   TEXT NOT NULL,
    sandbox TEXT NOT NULL,
    phase   TEXT NOT NULL,
    cause   TEXT
) STRICT;
