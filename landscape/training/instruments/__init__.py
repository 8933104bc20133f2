"""Instruments that measure a run as it goes, by name: what ``monitor.instruments`` may have."""
