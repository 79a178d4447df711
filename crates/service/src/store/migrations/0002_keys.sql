-- Names that clients chose. Each leads to one sandbox and goes with it; when a successor takes
-- its place, the name leads there from the moment the successor's row exists.
CREATE TABLE keys (
    owner   TEXT NOT NULL,
    space   TEXT NOT NULL,
    name    TEXT NOT NULL,
    sandbox TEXT NOT NULL,
    PRIMARY KEY (owner, space, name)
) STRICT;
CREATE INDEX keys_by_sandbox ON keys (sandbox);
