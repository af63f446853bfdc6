"""Scheduling and block accounting in pure Python: torch is never imported here. Called by one thread, the engine's."""
