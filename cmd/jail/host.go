package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"text/tabwriter"

	libseccomp "github.com/seccomp/libseccomp-golang"
	"github.com/spf13/cobra"

	"example.com/jail/jail"
)

// version is set by the build.
var version = "0.1.0-dev"

func (a *app) checkCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "check",
		Short: "Tell which budgets this host can enforce",
		Long: `Tell for each budget item whether this host can enforce it, by what, and if not
why and what to do. It is the table that run and script refuse from. The exit
code is 1 if anything that is not optional cannot be enforced.

Then tell where this host has the controllers of cgroups that the table rests on:
v2 delegated here, v2 not delegated, v1 or absent.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := ownScope(c.Context()); err != nil {
				fmt.Fprintf(a.stderr, "jail: %v\n", err)
			}
			table := jail.Preflight()
			for _, row := range table {
				if !row.Enforceable && !row.Optional {
					a.code = 1
				}
			}
			controllers, err := jail.Controllers()
			if err != nil {
				controllers = []jail.Controller{} // the table says why
			}
			if asJSON {
				e := json.NewEncoder(a.stdout)
				e.SetEscapeHTML(false)
				e.SetIndent("", "  ")
				return e.Encode(struct {
					V           int               `json:"v"`
					Items       []jail.Check      `json:"items"`
					Controllers []jail.Controller `json:"controllers"`
				}{1, table, controllers})
			}
			return printCheck(a.stdout, table, controllers)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print the tables as JSON")
	return c
}

func printCheck(to io.Writer, table []jail.Check, controllers []jail.Controller) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ITEM\tENFORCED\tBY")
	for _, row := range table {
		no := "no"
		if row.Optional {
			no = "no, optional"
		}
		if row.Enforceable {
			fmt.Fprintf(w, "%s\tyes\t%s\n", row.Item, row.By)
		} else {
			fmt.Fprintf(w, "%s\t%s\t%s\n\t\tfix: %s\n", row.Item, no, row.Reason, row.Fix)
		}
	}
	fmt.Fprintln(w, "\nCONTROLLER\tWHERE\tUSABLE")
	for _, c := range controllers {
		if c.Usable {
			fmt.Fprintf(w, "%s\t%s\tyes, %s\n", c.Name, c.Place, c.Dir)
		} else {
			fmt.Fprintf(w, "%s\t%s\tno: %s\n\t\tfix: %s\n", c.Name, c.Place, c.Reason, c.Fix)
		}
	}
	return w.Flush()
}

func (a *app) gcCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "gc",
		Short: "Remove what a killed launcher left behind",
		Long: `Remove cgroups of launchers that are dead, the templates kept for later runs in
/run/jail (JAIL_TEMPLATES), and the unpacked images in /var/lib/jail/images
(JAIL_IMAGES) that nobody uses. Running jails are not touched.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			groups, templates, err := jail.Collect(templates())
			for _, g := range groups {
				fmt.Fprintf(a.stdout, "removed cgroup %s\n", g)
			}
			for _, t := range templates {
				fmt.Fprintf(a.stdout, "dropped template %s\n", t)
			}
			images, imageErr := imageStore().Drop()
			for _, i := range images {
				fmt.Fprintf(a.stdout, "dropped image %s\n", i)
			}
			err = errors.Join(err, imageErr)
			if err == nil && len(groups)+len(templates)+len(images) == 0 {
				fmt.Fprintln(a.stdout, "nothing to remove")
			}
			return err
		},
	}
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print versions of jail, Go, libseccomp and the kernel",
		Args:  cobra.NoArgs,
		Run: func(*cobra.Command, []string) {
			commit := ""
			if info, ok := debug.ReadBuildInfo(); ok {
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" && len(s.Value) >= 12 {
						commit = " (" + s.Value[:12] + ")"
					}
				}
			}
			major, minor, micro := libseccomp.GetLibraryVersion()
			fmt.Fprintf(a.stdout, "jail %s%s\ngo %s\nlibseccomp %d.%d.%d\nlinux %s\n",
				version, commit, runtime.Version(), major, minor, micro, jail.KernelRelease())
		},
	}
}
