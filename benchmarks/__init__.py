"""Speed and memory, as ratios measured in one interleaved run; never part of the tests."""
