"""What a run would take on more workers: a cost model, and its calibration on this machine."""
