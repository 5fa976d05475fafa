"""One model of memory: what a step holds, traced without values; what a device has; which options lower it."""
