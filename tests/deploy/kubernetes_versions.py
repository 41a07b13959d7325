"""Versions of Kubernetes whose schemas the manifests must follow: an old one and a new one."""

KUBERNETES_VERSIONS = ("1.30", "1.34")
