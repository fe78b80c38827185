"""From candidates and a cluster to devices: where ranks run and how their processes are supervised."""
