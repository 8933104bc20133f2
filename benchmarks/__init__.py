"""Side-by-side timings (make bench). Never part of CI: machines differ, ratios in one run hold."""
