"""OpenShell SDK: typed clients for a gateway that runs agents in policed sandboxes."""
