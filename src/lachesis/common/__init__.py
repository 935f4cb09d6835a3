"""The ground floor, which every room uses and which uses none: records, errors, deadlines, files, imports. No torch."""
