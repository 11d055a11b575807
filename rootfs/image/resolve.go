package image

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const (
	maxLayers  = 512
	maxImages  = 1024 // that one index may lead to
	maxNesting = 4    // of indexes
	maxListed  = 16   // in an error
	maxNames   = 4    // of one image in it
)

// target is the one image that a ref means.
type target struct {
	digest v1.Hash
	config *v1.ConfigFile
	layers []layer
}

// layer is a blob and what is known of it.
type layer struct {
	blob   string
	digest v1.Hash // of the blob; zero in an archive of docker save
	size   int64   // of the blob; -1 likewise
	diffID v1.Hash // of the tar archive in it
}

// candidate is an image that a ref may mean.
type candidate struct {
	names    []string
	digests  []v1.Hash // its own, then those of the indexes that lead to it
	platform *v1.Platform
	read     func() (*target, error)
	target   *target // once read
}

func (c *candidate) load() (*target, error) {
	if c.target == nil {
		t, err := c.read()
		if err != nil {
			return nil, err
		}
		c.target = t
	}
	return c.target, nil
}

func (c *candidate) String() string {
	platform := "unknown platform"
	if c.platform != nil {
		platform = c.platform.String()
	}
	return fmt.Sprintf("%s %.64q %.128q", c.digests[0], platform, c.names[:min(len(c.names), maxNames)])
}

// named tells whether a tag means one of these names: the whole of it, what
// follows a slash of it, or what follows its last colon.
func named(tag string, names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		i := strings.LastIndexByte(name, ':')
		return name == tag || strings.HasSuffix(name, "/"+tag) || i > strings.LastIndexByte(name, '/') && name[i+1:] == tag
	})
}

func fits(p *v1.Platform) bool {
	return p != nil && p.OS == "linux" && p.Architecture == runtime.GOARCH
}

// resolve finds the image that is wanted and checks its manifest and
// configuration. Its layers are not looked at.
func (s *source) resolve(want selection) (*target, error) {
	var all []*candidate
	var err error
	switch {
	case s.has(layoutFile):
		all, err = s.layoutImages(want)
	case s.members != nil && s.has(dockerFile):
		all, err = s.dockerImages(want)
	case s.members != nil:
		return nil, fmt.Errorf("%w: archive has neither %s nor %s", ErrInvalid, layoutFile, dockerFile)
	default:
		return nil, fmt.Errorf("%w: directory has no %s", ErrInvalid, layoutFile)
	}
	if err != nil {
		return nil, err
	}
	var found *candidate
	several := false
	for _, c := range all {
		if want.digest != (v1.Hash{}) && !slices.Contains(c.digests, want.digest) {
			continue
		}
		// An index need not name platforms.
		if c.platform == nil {
			t, err := c.load()
			if err != nil {
				return nil, err
			}
			c.platform = t.config.Platform()
		}
		if fits(c.platform) {
			several = several || found != nil && found.digests[0] != c.digests[0]
			found = c
		}
	}
	if several {
		return nil, choice("several images, add :TAG or @DIGEST", want, all)
	}
	if found == nil {
		return nil, choice("no image for linux/"+runtime.GOARCH, want, all)
	}
	t, err := found.load()
	if err == nil && !fits(t.config.Platform()) {
		err = fmt.Errorf("%w: configuration is for %.64q, want linux/%s", ErrInvalid, t.config.OS+"/"+t.config.Architecture, runtime.GOARCH)
	}
	return t, err
}

func choice(problem string, want selection, all []*candidate) error {
	if want.tag != "" {
		problem += fmt.Sprintf(" with tag %q", want.tag)
	}
	if want.digest != (v1.Hash{}) {
		problem += fmt.Sprintf(" with digest %s", want.digest)
	}
	var list []string
	for _, c := range all {
		if len(list) == maxListed {
			list = append(list, fmt.Sprintf("and %d more", len(all)-maxListed))
			break
		}
		list = append(list, c.String())
	}
	if len(list) == 0 {
		list = []string{"nothing"}
	}
	return fmt.Errorf("%w: %s; there is: %s", ErrInvalid, problem, strings.Join(list, ", "))
}

// layoutImages lists the images of an OCI layout, those with the wanted tag if
// there is one.
func (s *source) layoutImages(want selection) ([]*candidate, error) {
	text, err := s.document(layoutFile)
	if err != nil {
		return nil, err
	}
	var version struct {
		Version string `json:"imageLayoutVersion"`
	}
	if err := json.Unmarshal(text, &version); err != nil || !strings.HasPrefix(version.Version, "1.") {
		return nil, fmt.Errorf("%w: %s: version %.32q, want 1 (%v)", ErrInvalid, layoutFile, version.Version, err)
	}
	text, err = s.document(indexFile)
	if err != nil {
		return nil, err
	}
	index, err := v1.ParseIndexManifest(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %v", ErrInvalid, indexFile, err)
	}

	type node struct {
		desc  v1.Descriptor
		names []string
		above []v1.Hash
	}
	var all, listed []*candidate
	var queue []node
	for _, d := range index.Manifests {
		n := node{desc: d}
		for _, key := range []string{"org.opencontainers.image.ref.name", "io.containerd.image.name"} {
			if name := d.Annotations[key]; name != "" && !slices.Contains(n.names, name) {
				n.names = append(n.names, name)
			}
		}
		if want.tag != "" && !named(want.tag, n.names) {
			listed = append(listed, &candidate{names: n.names, digests: []v1.Hash{d.Digest}, platform: d.Platform})
			continue
		}
		queue = append(queue, n)
	}
	if want.tag != "" && len(queue) == 0 {
		return nil, choice("no image", want, listed)
	}
	for seen := 0; len(queue) > 0; seen++ {
		if seen+len(queue) > maxImages {
			return nil, fmt.Errorf("%w: index leads to more than %d images", ErrInvalid, maxImages)
		}
		n := queue[0]
		queue = queue[1:]
		digests := append([]v1.Hash{n.desc.Digest}, n.above...)
		switch {
		case n.desc.MediaType.IsImage():
			if p := n.desc.Platform; p != nil && p.OS == "unknown" {
				continue // a signature or the like
			}
			all = append(all, &candidate{
				names: n.names, digests: digests, platform: n.desc.Platform,
				read: func() (*target, error) { return s.loadManifest(n.desc) },
			})
		case n.desc.MediaType.IsIndex():
			if len(n.above) == maxNesting {
				return nil, fmt.Errorf("%w: more than %d indexes within each other", ErrInvalid, maxNesting)
			}
			text, err := s.verified(n.desc)
			if err != nil {
				return nil, err
			}
			nested, err := v1.ParseIndexManifest(bytes.NewReader(text))
			if err != nil {
				return nil, fmt.Errorf("%w: index %s: %v", ErrInvalid, n.desc.Digest, err)
			}
			for _, d := range nested.Manifests {
				queue = append(queue, node{desc: d, names: n.names, above: digests})
			}
		}
	}
	return all, nil
}

func (s *source) loadManifest(d v1.Descriptor) (*target, error) {
	text, err := s.verified(d)
	if err != nil {
		return nil, err
	}
	m, err := v1.ParseManifest(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("%w: manifest %s: %v", ErrInvalid, d.Digest, err)
	}
	if m.MediaType != "" && m.MediaType != d.MediaType {
		return nil, fmt.Errorf("%w: manifest %s is a %.128q, its descriptor says %q", ErrInvalid, d.Digest, m.MediaType, d.MediaType)
	}
	text, err = s.verified(m.Config)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	var layers []layer
	for _, l := range m.Layers {
		// The second is a newer one than the list of IsLayer.
		if !l.MediaType.IsLayer() && l.MediaType != "application/vnd.docker.image.rootfs.diff.tar.zstd" {
			return nil, fmt.Errorf("%w: layer %s is a %.128q", ErrInvalid, l.Digest, l.MediaType)
		}
		layers = append(layers, layer{blob: blobName(l.Digest), digest: l.Digest, size: l.Size})
	}
	return newTarget(d.Digest, text, layers)
}

// newTarget joins a configuration and the layers that it tells the digests of.
func newTarget(digest v1.Hash, config []byte, layers []layer) (*target, error) {
	c, err := v1.ParseConfigFile(bytes.NewReader(config))
	if err != nil {
		return nil, fmt.Errorf("%w: configuration: %v", ErrInvalid, err)
	}
	if len(layers) > maxLayers {
		return nil, fmt.Errorf("%w: %d layers, limit %d", ErrInvalid, len(layers), maxLayers)
	}
	if len(c.RootFS.DiffIDs) != len(layers) {
		return nil, fmt.Errorf("%w: %d layers, the configuration tells of %d", ErrInvalid, len(layers), len(c.RootFS.DiffIDs))
	}
	for i := range layers {
		layers[i].diffID = c.RootFS.DiffIDs[i]
	}
	for _, e := range c.Config.Env {
		if strings.IndexByte(e, '=') < 1 || strings.IndexByte(e, 0) >= 0 {
			return nil, fmt.Errorf("%w: environment %.128q", ErrInvalid, e)
		}
	}
	if wd := c.Config.WorkingDir; wd != "" {
		c.Config.WorkingDir = path.Clean("/" + wd)
		if _, err := splitName(c.Config.WorkingDir); err != nil {
			return nil, fmt.Errorf("working directory: %w", err)
		}
	}
	return &target{digest: digest, config: c, layers: layers}, nil
}

// dockerImages lists the images of an archive of docker save.
func (s *source) dockerImages(want selection) ([]*candidate, error) {
	text, err := s.document(dockerFile)
	if err != nil {
		return nil, err
	}
	var entries []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(text, &entries); err != nil {
		return nil, fmt.Errorf("%w: %s: %v", ErrInvalid, dockerFile, err)
	}
	if len(entries) > maxImages {
		return nil, fmt.Errorf("%w: %s has more than %d images", ErrInvalid, dockerFile, maxImages)
	}
	var all, listed []*candidate
	for _, e := range entries {
		digest, _, err := s.dockerConfig(e.Config)
		if err != nil {
			return nil, err
		}
		c := &candidate{names: e.RepoTags, digests: []v1.Hash{digest}}
		c.read = func() (*target, error) {
			again, config, err := s.dockerConfig(e.Config)
			if err != nil {
				return nil, err
			}
			var layers []layer
			for _, l := range e.Layers {
				layers = append(layers, layer{blob: path.Clean(l), size: -1})
			}
			return newTarget(again, config, layers)
		}
		if want.tag != "" && !named(want.tag, e.RepoTags) {
			listed = append(listed, c)
			continue
		}
		all = append(all, c)
	}
	if want.tag != "" && len(all) == 0 {
		return nil, choice("no image", want, listed)
	}
	return all, nil
}

// dockerConfig reads a configuration of docker save, whose name has its digest.
func (s *source) dockerConfig(name string) (digest v1.Hash, config []byte, err error) {
	config, err = s.document(path.Clean(name))
	if err != nil {
		return digest, nil, fmt.Errorf("configuration: %w", err)
	}
	digest = digestOf(config)
	said, err := v1.NewHash("sha256:" + strings.TrimSuffix(path.Base(name), ".json"))
	if err == nil && said != digest {
		return digest, nil, fmt.Errorf("%w: configuration %s has the digest %s", ErrInvalid, said, digest)
	}
	return digest, config, nil
}
