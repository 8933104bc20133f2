"""The predicted time of a run on more workers: a cost model, and its calibration on this machine."""
