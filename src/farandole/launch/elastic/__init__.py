"""Jobs whose number of ranks changes while they run: ranks are lost, hosts come and go."""
