"""A run from nothing to a report: stages that are skipped when done, rebuilt when stale, and continued when cut."""
