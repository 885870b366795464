//! The groups of elements that share a scale, as runs of a tensor's axes.
//!
//! Each axis of length d is cut into d/e groups of e elements. Seen so, a tensor is an array of
//! shape `[d₀/e₀, e₀, d₁/e₁, e₁, …]`, of which every second axis counts groups and every other one
//! elements of a group; axes of length 1 are left out and neighbours of the same kind are merged:
//! a channel axis of a convolution weight gives `[groups, elements]`, that of a linear weight
//! `[elements, groups]`.
//!
//! Where e does not divide d, the last group along the axis is smaller. The tensor is then padded to
//! whole groups for whoever sees it so, and cut again afterwards.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape, Slice, Tensor, TensorData};
use burn_lean_reparam::reductions;

use crate::{Granularity, QuantError};

/// What the indices of a [`Run`] count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counts {
    Groups,
    Elements,
}

/// Neighbouring axes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) counts: Counts,
    pub(crate) len: usize,
}

/// How the elements of a tensor of one shape fall into groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Groups {
    /// The shape of the tensor.
    tensor: Vec<usize>,
    /// Elements of a group along each axis; the last may have fewer.
    extents: Vec<usize>,
    /// Groups along each axis.
    shape: Vec<usize>,
    /// The axes of the tensor, padded, cut and merged; outermost first.
    runs: Vec<Run>,
}

/// What a tensor is padded with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Padding {
    Zeros,
    /// The last element along the axis, which is in the same group.
    Edge,
}

impl Groups {
    pub(crate) fn new(granularity: &Granularity, shape: &[usize]) -> Result<Self, QuantError> {
        let extents = extents(granularity, shape)?;
        let mut runs: Vec<Run> = Vec::new();
        let mut push = |counts, len| match runs.last_mut() {
            _ if len == 1 => {}
            Some(last) if last.counts == counts => last.len *= len,
            _ => runs.push(Run { counts, len }),
        };
        let counts = shape.iter().zip(&extents);
        let counts: Vec<usize> = counts.map(|(len, extent)| len.div_ceil(*extent)).collect();
        for (count, extent) in counts.iter().zip(&extents) {
            push(Counts::Groups, *count);
            push(Counts::Elements, *extent);
        }
        Ok(Self {
            tensor: shape.to_vec(),
            extents,
            shape: counts,
            runs,
        })
    }

    /// Row-major index of the group of a row-major element.
    pub(crate) fn of_element(&self, mut index: usize) -> usize {
        let (mut group, mut stride) = (0, 1);
        let axes = self.tensor.iter().zip(&self.extents).zip(&self.shape);
        for ((len, extent), count) in axes.rev() {
            group += index % len / extent * stride;
            index /= len;
            stride *= count;
        }
        group
    }

    /// [`of_element`](Self::of_element) of all elements, in their order: neighbours along the last axis are not
    /// divided for one by one.
    pub(crate) fn of_all(&self) -> impl Iterator<Item = usize> + '_ {
        let last = self.tensor.len().checked_sub(1);
        let (len, extent) = last.map_or((1, 1), |last| (self.tensor[last], self.extents[last]));
        let rows: usize = match last {
            Some(last) if len > 0 => self.tensor[..last].iter().product(),
            Some(_) => 0,
            None => 1,
        };
        (0..rows).flat_map(move |row| {
            let first = self.of_element(row * len);
            let ends = (0..len).step_by(extent).enumerate();
            ends.flat_map(move |(group, start)| {
                std::iter::repeat_n(first + group, extent.min(len - start))
            })
        })
    }

    /// The largest extents of which all groups are made along each axis.
    pub(crate) fn common_extents(&self) -> Vec<usize> {
        let axes = self.tensor.iter().zip(&self.extents);
        axes.map(|(len, extent)| greatest_common_divisor(*extent, len % extent))
            .collect()
    }

    /// Whether some group has fewer elements than others.
    pub(crate) fn are_ragged(&self) -> bool {
        let mut axes = self.tensor.iter().zip(&self.extents);
        axes.any(|(len, extent)| !len.is_multiple_of(*extent))
    }

    /// The shape of the tensor in whole groups.
    fn padded(&self) -> Vec<usize> {
        let axes = self.shape.iter().zip(&self.extents);
        axes.map(|(count, extent)| count * extent).collect()
    }

    /// The tensor in whole groups; as it is where it consists of such.
    pub(crate) fn pad(&self, x: DispatchTensor, padding: Padding) -> DispatchTensor {
        if !self.are_ragged() {
            return x;
        }
        let mut shape = self.tensor.clone();
        let mut x = Dispatch::float_reshape(x, Shape::from(shape.clone()));
        for (axis, len) in self.padded().into_iter().enumerate() {
            let missing = len - shape[axis];
            if missing == 0 {
                continue;
            }
            let mut added = shape.clone();
            added[axis] = missing;
            let added = Shape::from(added);
            let filler = match padding {
                Padding::Zeros => Dispatch::float_zeros(added, &x.device(), x.dtype().into()),
                Padding::Edge => {
                    let mut last = whole(&shape);
                    last[axis] = Slice::from(shape[axis] - 1..shape[axis]);
                    Dispatch::float_expand(Dispatch::float_slice(x.clone(), &last), added)
                }
            };
            x = Dispatch::float_cat(vec![x, filler], axis);
            shape[axis] = len;
        }
        x
    }

    /// The tensor without what [`pad`](Self::pad) has added.
    pub(crate) fn cut_off(&self, x: DispatchTensor) -> DispatchTensor {
        if !self.are_ragged() {
            return x;
        }
        let x = Dispatch::float_reshape(x, Shape::from(self.padded()));
        Dispatch::float_slice(x, &whole(&self.tensor))
    }

    /// The number of elements of each group.
    fn lens(&self) -> Vec<f32> {
        let mut lens = vec![1.0];
        for (axis, count) in self.shape.iter().enumerate() {
            let (len, extent) = (self.tensor[axis], self.extents[axis]);
            let along = |group: usize| (len - group * extent).min(extent) as f32;
            let outer = lens.iter();
            lens = outer
                .flat_map(|outer| (0..*count).map(move |group| outer * along(group)))
                .collect();
        }
        lens
    }

    /// Groups along each axis of the tensor.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The tensor's axes, cut and merged; outermost first.
    #[cfg(any(feature = "flex", feature = "ndarray", feature = "kernels"))]
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The length of each run, outermost first, and how far apart the groups of neighbours along it
    /// are.
    #[cfg(feature = "cube")]
    pub(crate) fn strides(&self) -> Vec<(usize, usize)> {
        let mut stride = 1;
        let mut strides = Vec::with_capacity(self.runs.len());
        for run in self.runs.iter().rev() {
            match run.counts {
                Counts::Groups => {
                    strides.push((run.len, stride));
                    stride *= run.len;
                }
                Counts::Elements => strides.push((run.len, 0)),
            }
        }
        strides.reverse();
        strides
    }

    /// The lengths of the runs.
    pub(crate) fn cut(&self) -> Shape {
        match self.runs.is_empty() {
            true => Shape::from([1]),
            false => Shape::from(self.runs.iter().map(|run| run.len).collect::<Vec<_>>()),
        }
    }

    /// The axes of [`cut`](Self::cut) that count elements.
    pub(crate) fn element_dims(&self) -> Vec<usize> {
        let runs = self.runs.iter().enumerate();
        let elements = runs.filter(|(_, run)| run.counts == Counts::Elements);
        elements.map(|(dim, _)| dim).collect()
    }

    /// The number of groups.
    pub(crate) fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// The number of elements in a group that is not cut off.
    pub(crate) fn len(&self) -> usize {
        let elements = self
            .runs
            .iter()
            .filter(|run| run.counts == Counts::Elements);
        elements.map(|run| run.len).product()
    }

    /// The mean of each group.
    pub(crate) fn mean<const D: usize>(&self, x: Tensor<D>) -> Tensor<1> {
        let mut before: usize = self.runs.iter().map(|run| run.len).product();
        let mut after = 1;
        let x = self.pad(x.into_dispatch(), Padding::Zeros);
        let mut x = flat(x);
        for run in self.runs.iter().rev() {
            before /= run.len;
            match run.counts {
                Counts::Groups => after *= run.len,
                Counts::Elements => {
                    x = reductions::sum_dim(x.reshape([before, run.len, after]), 1).flatten(0, 2);
                }
            }
        }
        match self.are_ragged() {
            true => {
                let lens = TensorData::new(self.lens(), [self.count()]);
                let device = x.device();
                x / Tensor::from_data(lens, (&device, DType::F32))
            }
            false => x / self.len() as f32,
        }
    }

    /// One number for each element, that of its group.
    pub(crate) fn expand<const D: usize>(&self, x: Tensor<1>, shape: [usize; D]) -> Tensor<D> {
        let mut before = 1;
        let mut after: usize = self.count();
        let mut x = x;
        for run in &self.runs {
            match run.counts {
                Counts::Groups => after /= run.len,
                Counts::Elements => {
                    x = x
                        .reshape([before, 1, after])
                        .expand([before, run.len, after])
                        .flatten(0, 2);
                }
            }
            before *= run.len;
        }
        match self.are_ragged() {
            true => flat(self.cut_off(x.into_dispatch())).reshape(shape),
            false => x.reshape(shape),
        }
    }
}

fn flat(x: DispatchTensor) -> Tensor<1> {
    let len = x.shape().num_elements();
    Tensor::from_dispatch(Dispatch::float_reshape(x, Shape::from([len])))
}

/// All of a tensor of this shape.
fn whole(shape: &[usize]) -> Vec<Slice> {
    shape.iter().map(|len| Slice::from(0..*len)).collect()
}

pub(crate) fn greatest_common_divisor(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        b => greatest_common_divisor(b, a % b),
    }
}

/// The extent of a group along each axis.
fn extents(granularity: &Granularity, shape: &[usize]) -> Result<Vec<usize>, QuantError> {
    if shape.contains(&0) {
        return Err(QuantError::EmptyTensor {
            shape: shape.to_vec(),
        });
    }
    let extents = match granularity {
        Granularity::PerTensor => shape.to_vec(),
        Granularity::PerChannel { axis } => {
            let mut extents = shape.to_vec();
            let extent = extents.get_mut(*axis).ok_or(QuantError::AxisOutOfRange {
                axis: *axis,
                shape: shape.to_vec(),
            })?;
            *extent = 1;
            extents
        }
        Granularity::PerToken => {
            let mut extents = vec![1; shape.len()];
            if let (Some(extent), Some(len)) = (extents.last_mut(), shape.last()) {
                *extent = *len;
            }
            extents
        }
        Granularity::PerBlock { extents } => {
            let leading = shape.len().checked_sub(extents.len());
            let leading = leading.ok_or(QuantError::BlockRank {
                extents: extents.clone(),
                shape: shape.to_vec(),
            })?;
            let mut all = vec![1; leading];
            all.extend(extents);
            all
        }
    };
    let within = extents.into_iter().zip(shape);
    Ok(within.map(|(extent, len)| extent.clamp(1, *len)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(extents: &[usize], shape: &[usize]) -> Groups {
        let granularity = Granularity::PerBlock {
            extents: extents.to_vec(),
        };
        Groups::new(&granularity, shape).unwrap()
    }

    #[test]
    fn the_last_groups_have_what_is_left() {
        let groups = blocks(&[2, 4], &[3, 9]);
        assert_eq!(groups.shape(), [2, 3]);
        assert_eq!((groups.len(), groups.are_ragged()), (8, true));
        assert_eq!(groups.lens(), [8.0, 8.0, 2.0, 4.0, 4.0, 1.0]);
        let of: Vec<usize> = (0..27).map(|index| groups.of_element(index)).collect();
        let row = |first: usize| [0, 0, 0, 0, 1, 1, 1, 1, 2].map(|group| first + group);
        assert_eq!(of, [row(0), row(0), row(3)].concat());
        assert_eq!(groups.common_extents(), [1, 1]);
        assert_eq!(blocks(&[32], &[784]).common_extents(), [16]);
        let groups = blocks(&[2, 3], &[4, 6]);
        let of: Vec<usize> = (0..24).map(|index| groups.of_element(index)).collect();
        let row = |a, b| [a, a, a, b, b, b];
        assert_eq!(of, [row(0, 1), row(0, 1), row(2, 3), row(2, 3)].concat());
        // Fewer elements than a block.
        let groups = blocks(&[32, 1], &[3, 5]);
        assert_eq!((groups.shape(), groups.are_ragged()), (&[1, 5][..], false));
        assert_eq!(groups.len(), 3);
    }
}
