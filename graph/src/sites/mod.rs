//! Where a graph has numbers that quantization, or another operation on operands, is about.
//!
//! [`Graph::sites`] finds the uses of each [`Site`] in one recording.

mod channels;
mod edges;
mod functional;
mod insert;
mod product;
mod trace;
mod weighting;

use crate::{Graph, Site};

pub use edges::Views;
pub(crate) use insert::insert;

/// The end of an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The operand of this position: that in [`OperationIr::inputs`](burn::backend::ir::OperationIr::inputs).
    Operand(usize),
    /// The first result.
    Result,
}

/// One edge of a graph at a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteUse {
    /// The site.
    pub site: Site,
    /// Position of the node.
    pub node: usize,
    /// Which of its operands, or its result.
    pub place: Place,
    /// Whether the tensor is nothing but zeros that the forward pass makes: the state that a
    /// recurrence starts from.
    pub is_zero: bool,
    /// The [`Hook`](crate::hooks::Hook) whose result the tensor is, through views at most; its position
    /// in [`Graph::hooks`].
    pub hook: Option<usize>,
}

impl Graph {
    /// The sites of the forward pass, in the order of its operations: of each its edges.
    ///
    /// The output of a layer that is an operand of an attention is listed at both of its ends.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_graph::{Place, Role, Site, record};
    ///
    /// let device = Device::flex();
    /// let model = LinearConfig::new(4, 2).with_bias(false).init(&device);
    /// let x = Tensor::<2>::ones([3, 4], &device);
    /// let recording = record(&model, &x, |model, x| model.forward(x))?;
    /// let sites = recording.graph().sites();
    /// assert_eq!(sites[0].site, Site::new("weight", Role::Input));
    /// assert_eq!((sites[0].node, sites[0].place), (0, Place::Operand(0)));
    /// # Ok::<(), burn_lean_graph::GraphError>(())
    /// ```
    pub fn sites(&self) -> Vec<SiteUse> {
        trace::sites(self)
    }
}
