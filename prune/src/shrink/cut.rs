//! Slices of parameters: read, set to zero, cut out.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use burn_lean_graph::UnitGroup;
use burn_lean_reparam::{FloatVisitor, visit_plain_floats};

use crate::PruneError;
use crate::host::{read, select};

/// The numbers of the parameters along which units lie.
pub(super) struct Weights {
    by_id: HashMap<ParamId, Weight>,
}

/// A parameter.
pub(super) struct Weight {
    pub(super) shape: Vec<usize>,
    values: Vec<f32>,
}

impl Weight {
    /// The sum of squares of what lies at these places of an axis.
    pub(super) fn squares(&self, axis: usize, places: &[usize]) -> f64 {
        let stride: usize = self.shape[axis + 1..].iter().product();
        let size = self.shape[axis];
        let outer = self.values.len() / (stride * size).max(1);
        let slices = (0..outer).flat_map(|block| {
            places
                .iter()
                .map(move |place| (block * size + place) * stride)
        });
        slices
            .flat_map(|first| &self.values[first..first + stride])
            .map(|w| f64::from(*w) * f64::from(*w))
            .sum()
    }
}

impl Weight {
    /// What a layer makes of constants at these places of the axis that it reads.
    pub(super) fn applied(&self, axis: usize, places: &[usize], constants: &[f32]) -> Vec<f32> {
        // Weights have their outputs on the other one of the first two axes.
        let outputs = 1 - axis.min(1);
        let stride = |axis: usize| self.shape[axis + 1..].iter().product::<usize>();
        let (by_input, by_output) = (stride(axis), stride(outputs));
        let (inputs, count) = (self.shape[axis], self.shape[outputs]);
        let mut sums = vec![0.0_f64; count];
        // Those places alone: a reader of thousands of units is asked for each of them.
        for block in 0..self.values.len() / (by_input * inputs).max(1) {
            for (place, constant) in places.iter().zip(constants) {
                let first = (block * inputs + place) * by_input;
                let weights = &self.values[first..first + by_input];
                for (at, w) in (first..).zip(weights) {
                    sums[at / by_output % count] += f64::from(*w) * f64::from(*constant);
                }
            }
        }
        sums.into_iter().map(|sum| sum as f32).collect()
    }
}

impl Weights {
    pub(super) fn of<M: Module>(model: &M, groups: &[UnitGroup]) -> Result<Self, PruneError> {
        struct Reading {
            wanted: HashSet<ParamId>,
            read: Result<HashMap<ParamId, Weight>, PruneError>,
        }
        impl FloatVisitor for Reading {
            fn visit<const D: usize>(&mut self, _path: &str, param: &Param<Tensor<D>>) {
                let Ok(known) = &mut self.read else { return };
                if !self.wanted.contains(&param.id) || known.contains_key(&param.id) {
                    return;
                }
                match read(param.val()) {
                    Ok(values) => {
                        let weight = Weight {
                            shape: param.shape().to_vec(),
                            values,
                        };
                        known.insert(param.id, weight);
                    }
                    Err(error) => self.read = Err(error),
                }
            }
        }
        let axes = groups.iter().flat_map(|group| &group.axes);
        let mut reading = Reading {
            wanted: axes.map(|axis| axis.id).collect(),
            read: Ok(HashMap::new()),
        };
        visit_plain_floats(model, &mut reading);
        reading.read.map(|by_id| Self { by_id })
    }

    pub(super) fn get(&self, id: &ParamId) -> Option<&Weight> {
        self.by_id.get(id)
    }
}

/// Places of axes that go, by parameter.
type Gone = HashMap<ParamId, HashMap<usize, HashSet<usize>>>;

fn places(groups: &[UnitGroup], gone: &[HashSet<usize>], readers_only: bool) -> Gone {
    let mut places = Gone::new();
    for (group, gone) in groups.iter().zip(gone) {
        for axis in &group.axes {
            if readers_only && !axis.role.reads() {
                continue;
            }
            let here = gone.iter().flat_map(|unit| &axis.places[*unit]);
            let of_axis = places.entry(axis.id).or_default();
            of_axis.entry(axis.axis).or_default().extend(here);
        }
    }
    places
}

/// The model whose remaining units do not read those that go.
pub(super) fn silence<M: Module>(
    model: M,
    groups: &[UnitGroup],
    gone: &[HashSet<usize>],
    moved: &HashMap<ParamId, Vec<f32>>,
) -> M {
    changed(model, places(groups, gone, true), moved, false)
}

/// The model without them.
pub(super) fn cut<M: Module>(
    model: M,
    groups: &[UnitGroup],
    gone: &[HashSet<usize>],
    moved: &HashMap<ParamId, Vec<f32>>,
) -> M {
    changed(model, places(groups, gone, false), moved, true)
}

fn changed<M: Module>(model: M, gone: Gone, moved: &HashMap<ParamId, Vec<f32>>, cuts: bool) -> M {
    struct Changing<'a> {
        gone: Gone,
        moved: &'a HashMap<ParamId, Vec<f32>>,
        cuts: bool,
        /// New identities of what was cut, by the old ones: copies stay copies.
        renamed: HashMap<ParamId, ParamId>,
    }
    impl ModuleMapper for Changing<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let id = param.id;
            let param = match self.moved.get(&id) {
                Some(moved) => param.map(|value| {
                    let data = TensorData::new(moved.clone(), value.shape());
                    let moved = Tensor::from_data(data, (&value.device(), value.dtype()));
                    value + moved
                }),
                None => param,
            };
            let axes = self.gone.get(&id).into_iter().flatten();
            let axes = axes.filter(|(_, gone)| !gone.is_empty());
            let param = axes.fold(param, |param, (axis, gone)| {
                let all = 0..param.shape()[*axis];
                if self.cuts {
                    let kept: Vec<usize> = all.filter(|place| !gone.contains(place)).collect();
                    return keep(param, *axis, &kept);
                }
                param.map(|value| {
                    let mut shape = [1; D];
                    shape[*axis] = value.dims()[*axis];
                    let mask = all.map(|place| f32::from(u8::from(!gone.contains(&place))));
                    let data = TensorData::new(mask.collect::<Vec<_>>(), shape);
                    value.clone() * Tensor::from_data(data, (&value.device(), value.dtype()))
                })
            });
            if param.id == id {
                return param;
            }
            let (new, value, mapper) = param.consume();
            let id = *self.renamed.entry(id).or_insert(new);
            Param::from_mapped_value(id, value, mapper)
        }
    }
    model.map(&mut Changing {
        gone,
        moved,
        cuts,
        renamed: HashMap::new(),
    })
}

/// The parameter at some indices of `axis`: a new one, because an optimizer's state for the old one
/// would not fit.
fn keep<const D: usize>(param: Param<Tensor<D>>, axis: usize, kept: &[usize]) -> Param<Tensor<D>> {
    let (_, value, mapper) = param.consume();
    let trains = value.is_require_grad();
    let value = select(value, axis, kept.iter().copied())
        .detach()
        .set_require_grad(trains);
    Param::from_mapped_value(ParamId::new(), value, mapper)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of matrices that lie either way, and of convolutions.
    #[test]
    fn constants_are_applied_as_a_layer_applies_its_inputs() {
        let cases: [(Vec<usize>, usize); 4] = [
            (vec![4, 3], 0),
            (vec![3, 4], 1),
            (vec![3, 4, 2, 5], 1),
            (vec![4, 3, 2], 0),
        ];
        for (shape, axis) in cases {
            let count: usize = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|at| (at * at % 17) as f32 - 8.0).collect();
            let inputs = [0.0_f32, 2.0, 0.0, -3.0];
            let mut expected = vec![0.0_f32; 3];
            let behind: usize = shape[2..].iter().product();
            for (at, value) in values.iter().enumerate() {
                let [first, second] = [at / behind / shape[1], at / behind % shape[1]];
                let (input, output) = match axis {
                    0 => (first, second),
                    _ => (second, first),
                };
                expected[output] += value * inputs[input];
            }
            let weight = Weight { shape, values };
            assert_eq!(weight.applied(axis, &[1, 3], &[2.0, -3.0]), expected);
        }
    }
}
