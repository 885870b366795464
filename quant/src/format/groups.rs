//! The groups of elements that share a scale, as runs of a tensor's axes.
//!
//! Each axis of length d is cut into d/e groups of e elements. Seen so, a tensor is an array of
//! shape `[d₀/e₀, e₀, d₁/e₁, e₁, …]`, of which every second axis counts groups and every other one
//! elements of a group; axes of length 1 are left out and neighbours of the same kind are merged:
//! a channel axis of a convolution weight gives `[groups, elements]`, that of a linear weight
//! `[elements, groups]`.

use burn::tensor::{Shape, Tensor};

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
    /// Groups along each axis.
    shape: Vec<usize>,
    /// The tensor's axes, cut and merged; outermost first.
    runs: Vec<Run>,
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
        for (len, extent) in shape.iter().zip(&extents) {
            push(Counts::Groups, len / extent);
            push(Counts::Elements, *extent);
        }
        let shape = shape.iter().zip(&extents).map(|(len, extent)| len / extent);
        Ok(Self {
            shape: shape.collect(),
            runs,
        })
    }

    /// Groups along each axis of the tensor.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The tensor's axes, cut and merged; outermost first.
    #[cfg(any(feature = "flex", feature = "ndarray"))]
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

    /// The number of elements in each group.
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
        let mut x = x.flatten::<1>(0, D - 1);
        for run in self.runs.iter().rev() {
            before /= run.len;
            match run.counts {
                Counts::Groups => after *= run.len,
                Counts::Elements => {
                    x = x.reshape([before, run.len, after]).sum_dim(1).flatten(0, 2);
                }
            }
        }
        x / self.len() as f32
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
        x.reshape(shape)
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
    for (axis, (len, extent)) in shape.iter().zip(&extents).enumerate() {
        if len.checked_rem(*extent) != Some(0) {
            return Err(QuantError::NotDivisible {
                axis,
                extent: *extent,
                shape: shape.to_vec(),
            });
        }
    }
    Ok(extents)
}
