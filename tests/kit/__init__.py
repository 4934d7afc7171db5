"""What rooms of tests share: toy federations, sites, keys, finished runs, servers, hostile peers."""
