"""Browser tests. A package, so that what they share (browser, viewers) ends with the last of them, not with the run."""
