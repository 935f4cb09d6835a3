"""Basic parts that all rooms use, and that use no room: records, errors, deadlines, files, imports. No torch."""
