-- The newest events of sandboxes. A copy for readers that reconnect after a server restart;
-- the last events before a crash may be missing.
CREATE TABLE events (
    id      INTEGER PRIMARY KEY,
    time    INTEGER NOT NULL,
    owner   TEXT NOT NULL,
    sandbox TEXT NOT NULL,
    phase   TEXT NOT NULL,
    cause   TEXT
) STRICT;
