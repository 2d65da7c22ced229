"""Many ranks without a cluster: what a deadline would be worth, by the library's own policies and model of a step."""
