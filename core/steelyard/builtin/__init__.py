"""What comes with the core: plain floats, the torch reference kernels, the safetensors format.

It enters through core's own entry points, like any plugin, and imports from steelyard only what a plugin may.
"""
