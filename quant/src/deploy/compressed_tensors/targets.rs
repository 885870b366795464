//! Which group of a configuration a layer is in.

use regex::Regex;

use super::config::{Arguments, Group, QuantizationConfig};
use super::layout::Place;

/// What a target that is a pattern starts with.
const PATTERN: &str = "re:";

/// The groups of a configuration, by what they target.
pub(super) struct Targets {
    groups: Vec<Group>,
    /// In the order in which they are tried, each with the place of its group.
    patterns: Vec<(Regex, usize)>,
}

fn unread(pattern: &str, group: &str, error: &regex::Error) -> String {
    let reason = error.to_string();
    // The lines before show the pattern.
    let reason = reason.lines().last().unwrap_or_default();
    format!(
        "the target `{PATTERN}{pattern}` of its group `{group}` cannot be read, name its layers \
         instead: {reason}"
    )
}

impl Targets {
    /// Or which target cannot be read, and why.
    pub(super) fn of(config: &QuantizationConfig) -> Result<Self, String> {
        let groups: Vec<Group> = config.config_groups.values().cloned().collect();
        let mut patterns = Vec::new();
        // A group that is the only one has every layer, whatever its targets are.
        if groups.len() > 1 {
            for (at, (name, group)) in config.config_groups.iter().enumerate() {
                let targets = group.targets.iter();
                let of_group = targets.filter_map(|target| target.strip_prefix(PATTERN));
                patterns.extend(of_group.map(|pattern| (pattern, at, name)));
            }
        }
        // As the library tries them.
        patterns.sort_unstable();
        let compiled = patterns.into_iter().map(|(pattern, at, name)| {
            let compiled = Regex::new(pattern).map_err(|error| unread(pattern, name, &error));
            compiled.map(|compiled| (compiled, at))
        });
        let patterns = compiled.collect::<Result<Vec<_>, String>>()?;
        Ok(Self { groups, patterns })
    }

    /// How the weights of a layer are quantized.
    pub(super) fn weights(&self, place: &Place) -> Option<&Arguments> {
        self.group(place)?.weights.as_ref()
    }

    /// How the inputs of a layer are quantized.
    pub(super) fn inputs(&self, place: &Place) -> Option<&Arguments> {
        self.group(place)?.input_activations.as_ref()
    }

    /// The group that names the layer, has a pattern for its name, or names its class; that of linear
    /// layers for matrices of other modules.
    fn group(&self, place: &Place) -> Option<&Group> {
        if let [only] = &self.groups[..] {
            return Some(only);
        }
        self.naming(&place.layer)
            .or_else(|| self.with_pattern_for(&place.layer))
            .or_else(|| self.naming(&place.class))
            .or_else(|| self.naming("Linear"))
    }

    fn naming(&self, name: &str) -> Option<&Group> {
        let mut groups = self.groups.iter();
        groups.find(|group| group.targets.iter().any(|target| target == name))
    }

    fn with_pattern_for(&self, layer: &str) -> Option<&Group> {
        let mut patterns = self.patterns.iter();
        let (_, at) = patterns.find(|(pattern, _)| {
            // From the start of the name on, as Python's `re.match`; it may go on after.
            let found = pattern.find(layer);
            found.is_some_and(|found| found.start() == 0)
        })?;
        self.groups.get(*at)
    }
}
