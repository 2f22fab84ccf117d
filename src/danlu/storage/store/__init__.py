"""Files in a folder, an object store, memory or another host's memory behind one interface: `base.open_store`."""
