"""The picture of a run: one HTML page from the files of its workdir."""
