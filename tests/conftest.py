"""Being here puts tests/ on the import path, so that every test folder finds `tiny` and `faults`."""
