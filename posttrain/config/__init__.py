"""ConfigDict <-> schema, and the checks that span options."""
