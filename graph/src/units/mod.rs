//! Which slices of which parameters go together: the units that can be cut out of a network.
//!
//! A channel of a convolution is a slice of its weight, of its bias, of the norm behind it, of every
//! weight that reads it, and, across a residual sum, of everything that is added to it. Such coupled
//! slices are found by following each place of each axis of each parameter through the operations
//! ([DepGraph](https://arxiv.org/abs/2301.12900) follows layers; here it is numbers).

mod classes;
mod flow;
mod reshape;

use std::collections::{BTreeMap, HashMap, HashSet};

use burn::module::ParamId;

use crate::Graph;
use classes::Classes;
use flow::Flow;
use reshape::Splits;

/// What a parameter has to do with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UnitRole {
    /// Its slice computes the unit: an output channel of a weight.
    Makes,
    /// Its slice is applied to the unit: an input channel of a weight.
    Reads,
    /// Its slice does both: that of a tied weight, as in an autoencoder.
    MakesAndReads,
    /// One number or a few for each unit: a bias, the scale of a norm, a running statistic.
    Follows,
}

impl UnitRole {
    /// Whether its slice computes the unit.
    pub fn makes(self) -> bool {
        matches!(self, Self::Makes | Self::MakesAndReads)
    }

    /// Whether its slice is applied to the unit.
    pub fn reads(self) -> bool {
        matches!(self, Self::Reads | Self::MakesAndReads)
    }

    fn and(self, other: Self) -> Self {
        match (self.makes() || other.makes(), self.reads() || other.reads()) {
            (true, true) => Self::MakesAndReads,
            (true, false) => Self::Makes,
            (false, true) => Self::Reads,
            (false, false) => Self::Follows,
        }
    }
}

/// Why units cannot be cut out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FixedBy {
    /// They are inputs of the model, or places of them.
    Input,
    /// They are outputs of the model.
    Output,
    /// They meet a tensor that is no parameter.
    Constant,
    /// Norms, softmax and other reductions take all of them together.
    Reduction,
    /// The convolution has groups, whose number is written into the module.
    Groups,
    /// A product of two computed tensors, as an attention has, multiplies them with each other, or with
    /// places of a sequence.
    Attention,
    /// A reshape splits or mixes them: the sizes are written into the model.
    Reshape,
    /// One unit is spread over several.
    Broadcast,
    /// The caller wants them to stay.
    Excepted,
    /// Their number is written into the model: it does not run with another one.
    Written,
    /// An operation of this name does not say.
    Operation(&'static str),
}

impl std::fmt::Display for FixedBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Input => "inputs of the model",
            Self::Output => "outputs of the model",
            Self::Constant => "they meet a tensor that is no parameter",
            Self::Reduction => "a norm, a softmax or a mean takes all of them together",
            Self::Groups => "the number of groups of a convolution is written into it",
            Self::Attention => "a product of two computed tensors multiplies them with each other",
            Self::Reshape => "a reshape splits or mixes them",
            Self::Broadcast => "one is spread over several",
            Self::Excepted => "they are excepted",
            Self::Written => {
                "their number is written into the model, or a result that is not returned is made of them"
            }
            Self::Operation(name) => return write!(f, "`{name}` mixes them"),
        })
    }
}

/// An axis of a parameter along which units lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitAxis {
    /// Path of the parameter.
    pub path: String,
    /// Burn's identity of it.
    pub id: ParamId,
    /// The axis.
    pub axis: usize,
    /// What the parameter has to do with the units.
    pub role: UnitRole,
    /// For each unit of the group the places on the axis.
    pub places: Vec<Vec<usize>>,
}

/// Units that lie along the same axes of the same parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitGroup {
    /// The axes, in the order of the parameters.
    pub axes: Vec<UnitAxis>,
    /// How many units there are.
    pub units: usize,
    /// Why they cannot be cut out; `None` where they can.
    pub fixed: Option<FixedBy>,
    /// Whether something that depends on the inputs, and is none of them, is applied to all of them:
    /// a gate of one number for each example. A unit that is made of nothing varies all the same.
    pub varies: bool,
}

impl Graph {
    /// The units of the recorded forward pass, by the axes of parameters that they span.
    ///
    /// A unit can be cut out of a group that is not [`fixed`](UnitGroup::fixed): its places go from
    /// all axes. What its own operations computed is gone, and nothing else changes but what its
    /// readers added up of it.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Tensor, activation::relu};
    /// use burn_lean_graph::{FixedBy, record};
    ///
    /// let device = Device::flex();
    /// let model: Vec<Linear> = [(4, 8), (8, 2)]
    ///     .map(|(inputs, outputs)| LinearConfig::new(inputs, outputs).init(&device))
    ///     .to_vec();
    /// let recording = record(&model, &Tensor::<2>::zeros([1, 4], &device), |model, x| {
    ///     model[1].forward(relu(model[0].forward(x)))
    /// })?;
    /// let groups = recording.graph().units();
    /// let hidden = groups.iter().find(|group| group.fixed.is_none()).unwrap();
    /// assert_eq!(hidden.units, 8);
    /// let axes: Vec<_> = hidden.axes.iter().map(|one| (&one.path[..], one.axis)).collect();
    /// assert_eq!(axes, [("0.weight", 1), ("0.bias", 0), ("1.weight", 0)]);
    /// assert!(groups.iter().any(|group| group.fixed == Some(FixedBy::Output)));
    /// # Ok::<(), burn_lean_graph::GraphError>(())
    /// ```
    pub fn units(&self) -> Vec<UnitGroup> {
        let mut classes = Classes::default();
        let own = self.followed(&mut classes, None);
        grouped(self, &own, &mut classes)
    }

    /// The units where numbers that are written into the model become smaller with its parameters.
    ///
    /// [`units`](Self::units) has those that can go while the forward pass stays as it is. Heads of an
    /// attention, channels of a depthwise convolution and groups of a norm can go, too, where the
    /// model's number of heads or groups follows: a head is a unit of several places on the axis of
    /// each projection.
    ///
    /// ```
    /// use burn::nn::conv::{Conv2d, Conv2dConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_graph::record;
    ///
    /// let device = Device::flex();
    /// let model: Vec<Conv2d> = [(3, 8, 1), (8, 8, 8), (8, 2, 1)]
    ///     .map(|(i, o, groups)| Conv2dConfig::new([i, o], [1, 1]).with_groups(groups).init(&device))
    ///     .to_vec();
    /// let forward = |model: &Vec<Conv2d>, x| model.iter().fold(x, |x, layer| layer.forward(x));
    /// let recording = record(&model, &Tensor::<4>::zeros([1, 3, 4, 4], &device), forward)?;
    /// let free = |one: &burn_lean_graph::UnitGroup| one.fixed.is_none();
    /// assert!(!recording.graph().units().iter().any(free));
    /// let groups = recording.graph().units_resized();
    /// assert_eq!(groups.iter().find(|group| free(group)).unwrap().units, 8);
    /// # Ok::<(), burn_lean_graph::GraphError>(())
    /// ```
    pub fn units_resized(&self) -> Vec<UnitGroup> {
        let mut splits = Splits::default();
        loop {
            let mut classes = Classes::default();
            let own = self.followed(&mut classes, Some(&mut splits));
            let places = own.iter().flatten().flatten();
            let read = places.filter(|id| classes.role(**id).reads());
            let read: Vec<u32> = read.copied().collect();
            let read: HashSet<u32> = read.into_iter().map(|id| classes.root(id)).collect();
            let is_useful = |id| classes.fixed(id).is_none() && read.contains(&classes.root(id));
            if !splits.advance(is_useful) {
                return grouped(self, &own, &mut classes);
            }
        }
    }

    /// Follows all places; returns those of the parameters.
    fn followed(&self, classes: &mut Classes, splits: Option<&mut Splits>) -> Vec<Vec<Vec<u32>>> {
        let own: Vec<Vec<Vec<u32>>> = self
            .parameters()
            .iter()
            .map(|parameter| parameter.shape.iter().map(|n| classes.fresh(*n)).collect())
            .collect();
        Flow::new(self, &own, classes, splits).run();
        // One parameter may be shown at several paths.
        let mut seen = HashMap::new();
        for (index, parameter) in self.parameters().iter().enumerate() {
            let first = *seen
                .entry((parameter.id, &parameter.shape))
                .or_insert(index);
            for (ours, theirs) in own[index].iter().zip(&own[first]) {
                classes.join_all(ours, theirs);
            }
        }
        own
    }
}

/// The places of all units, put together by the axes that they lie on.
fn grouped(graph: &Graph, own: &[Vec<Vec<u32>>], classes: &mut Classes) -> Vec<UnitGroup> {
    type Slices = BTreeMap<(usize, usize), Vec<usize>>;
    let mut units: BTreeMap<u32, Slices> = BTreeMap::new();
    let mut roles: HashMap<(usize, usize), UnitRole> = HashMap::new();
    for (index, axes) in own.iter().enumerate() {
        for (axis, places) in axes.iter().enumerate() {
            for (place, id) in places.iter().enumerate() {
                let role = roles.entry((index, axis)).or_insert(UnitRole::Follows);
                *role = role.and(classes.role(*id));
                let slices = units.entry(classes.root(*id)).or_default();
                slices.entry((index, axis)).or_default().push(place);
            }
        }
    }
    // In the order of their first places.
    let mut in_order: Vec<(u32, Slices)> = units.into_iter().collect();
    in_order.sort_by(|(_, a), (_, b)| a.iter().next().cmp(&b.iter().next()));
    let mut groups: Vec<(Vec<(usize, usize)>, UnitGroup)> = Vec::new();
    for (root, slices) in in_order {
        let is_made = slices.keys().any(|at| roles[at].makes());
        let is_read = slices.keys().any(|at| roles[at].reads());
        if !is_made && !is_read {
            continue;
        }
        let fixed = match is_made {
            true => classes.fixed(root),
            false => Some(classes.fixed(root).unwrap_or(FixedBy::Input)),
        };
        let varies = classes.varies(root);
        let keys: Vec<(usize, usize)> = slices.keys().copied().collect();
        let same = |(other, group): &&mut (Vec<(usize, usize)>, UnitGroup)| {
            *other == keys && group.fixed == fixed && group.varies == varies
        };
        let group = match groups.iter_mut().find(same) {
            Some((_, group)) => group,
            None => {
                let axes = keys.iter().map(|(index, axis)| {
                    let parameter = &graph.parameters()[*index];
                    UnitAxis {
                        path: parameter.path.clone(),
                        id: parameter.id,
                        axis: *axis,
                        role: roles[&(*index, *axis)],
                        places: Vec::new(),
                    }
                });
                let group = UnitGroup {
                    axes: axes.collect(),
                    units: 0,
                    fixed,
                    varies,
                };
                groups.push((keys, group));
                &mut groups.last_mut().expect("one was just added").1
            }
        };
        group.units += 1;
        for (axis, places) in group.axes.iter_mut().zip(slices.into_values()) {
            axis.places.push(places);
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}
