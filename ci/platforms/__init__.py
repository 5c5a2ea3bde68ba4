"""One JSON file for each machine that can be played back: `dsv41 probe --as NAME`."""
