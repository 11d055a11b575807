package jail

import (
	"errors"

	"example.com/jail/cgroup"
	"example.com/jail/rootfs"
)

// Collect removes what killed launchers left behind: cgroups below the caller's
// own whose maker is dead, with whatever is still in them, and the pinned
// templates of a cache. Running jails are not touched.
// It returns the names of what it removed, also beside an error.
func Collect(cache *rootfs.Cache) (groups, templates []string, err error) {
	host, groupErr := cgroup.Probe()
	if groupErr == nil {
		groups, groupErr = host.Collect()
	}
	templates, templateErr := cache.Drop()
	return groups, templates, errors.Join(groupErr, templateErr)
}
