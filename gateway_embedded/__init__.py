"""A gateway in one process: the OpenShell API in front of any compute driver."""
