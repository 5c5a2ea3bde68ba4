"""The kernels. Each sub-package is one backend; none is imported before its requirements hold."""
