"""Files of splats, meshes and points of any program, to look at: in the viewer, and meshes as pages."""
