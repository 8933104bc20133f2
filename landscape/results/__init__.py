"""Finished results: frozen arrays and attributes that save and load themselves."""
