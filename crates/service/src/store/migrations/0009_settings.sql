-- The settings that sandboxes made from a snapshot inherit, as JSON, and the time to live that a
-- sandbox was created with, in microseconds. Earlier rows have neither.
ALTER TABLE snapshots ADD COLUMN settings TEXT;
ALTER TABLE sandboxes ADD COLUMN timeout INTEGER;
