-- The usage of an owner's sandboxes in one hour, counted since 1970.
CREATE TABLE hours (
    number              INTEGER NOT NULL,
    owner               TEXT NOT NULL,
    created             INTEGER NOT NULL,
    alive_millis        INTEGER NOT NULL,
    cpu_micros          INTEGER NOT NULL,
    memory_byte_seconds INTEGER NOT NULL,
    PRIMARY KEY (number, owner)
) STRICT;
