//! The dtypes of all operations of a recorded forward pass.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{TensorId, TensorIr};
use burn::tensor::{DType, FloatDType};
use burn_lean_graph::{Graph, Node};

use super::call_site::Modules;
use super::operation::{adds_gradients, exponent, is_cast, overflows_from, risks};
use super::{AuditedOperation, Finding};
use crate::autocast::ParameterPrecision;

pub(super) struct Pass<'a> {
    pub(super) graph: &'a Graph,
    /// Dtypes of float tensors that are other than recorded.
    dtypes: HashMap<TensorId, DType>,
}

impl<'a> Pass<'a> {
    /// As it was recorded.
    pub(super) fn recorded(graph: &'a Graph) -> Self {
        Self {
            graph,
            dtypes: HashMap::new(),
        }
    }

    /// As the casts come to that were noted in it, in a region of `half`.
    ///
    /// Results have the dtype of the operands. Where those mix, the result has the dtype of the
    /// region, which it would have if the operation were in full precision: what follows is not
    /// blamed for it.
    pub(super) fn of_noted_casts(graph: &'a Graph, half: FloatDType) -> Self {
        let mut pass = Self::recorded(graph);
        for node in graph.nodes() {
            let dtypes = pass.inputs(&node);
            let dtype = match (node.noted_cast(), &dtypes[..]) {
                (Some(dtype), _) => dtype.into(),
                (None, []) => continue,
                (None, [dtype]) => *dtype,
                (None, _) => half.into(),
            };
            // A cast of the model's own is recorded.
            if is_cast(node.operation()) {
                continue;
            }
            for output in node.operation().outputs() {
                if output.dtype.is_float() {
                    pass.dtypes.insert(output.id, dtype);
                }
            }
        }
        pass
    }

    pub(super) fn dtype(&self, tensor: &TensorIr) -> DType {
        self.dtypes.get(&tensor.id).copied().unwrap_or(tensor.dtype)
    }

    pub(super) fn bytes(&self, tensor: &TensorIr) -> usize {
        tensor.shape.num_elements() * self.dtype(tensor).size()
    }

    /// Dtypes of the float operands, without repetition.
    fn inputs(&self, node: &Node<'_>) -> Vec<DType> {
        self.floats(node.operands())
    }

    fn floats<'t>(&self, tensors: impl Iterator<Item = &'t TensorIr>) -> Vec<DType> {
        let mut dtypes: Vec<DType> = Vec::new();
        for dtype in tensors.map(|tensor| self.dtype(tensor)) {
            if dtype.is_float() && !dtypes.contains(&dtype) {
                dtypes.push(dtype);
            }
        }
        dtypes
    }

    /// What is to be said of each operation on floats; `is_lacking` tells of the device.
    pub(super) fn audited(
        &self,
        parameters: &[ParameterPrecision],
        is_lacking: impl Fn(DType) -> bool,
    ) -> Vec<AuditedOperation> {
        let modules = Modules::of(self.graph, parameters);
        let lacking: HashSet<DType> = [DType::F16, DType::BF16, DType::F32, DType::F64]
            .into_iter()
            .filter(|dtype| is_lacking(*dtype))
            .collect();
        let mut exponents = HashMap::new();
        for node in self.graph.nodes() {
            if let Some(exponent) = exponent(&node) {
                exponents.extend(node.operation().outputs().map(|made| (made.id, exponent)));
            }
        }
        let audited = self.graph.nodes().filter_map(|node| {
            let inputs = self.inputs(&node);
            let outputs = self.floats(node.operation().outputs());
            if (inputs.is_empty() && outputs.is_empty()) || node.noted_cast().is_some() {
                return None;
            }
            let mut findings = Vec::new();
            if inputs.len() > 1 {
                findings.push(Finding::MixedDtypes);
            }
            if outputs.iter().any(|dtype| lacking.contains(dtype)) {
                findings.push(Finding::UnsupportedDtype);
            }
            for dtype in &inputs {
                findings.extend(risks(&node, *dtype));
            }
            let is_half = |dtype: &DType| matches!(dtype, DType::F16 | DType::BF16);
            let adds_gradients = adds_gradients(&node) && inputs.iter().any(is_half);
            let is_f16 = inputs.contains(&DType::F16);
            let (module, is_after) = modules.at(&node);
            let mut parameters: Vec<String> =
                node.parameters().map(|one| one.path.clone()).collect();
            parameters.sort_unstable();
            parameters.dedup();
            let shape = node.operation().outputs().next();
            Some(AuditedOperation {
                name: node.name().into(),
                module,
                is_after,
                inputs,
                outputs,
                shape: shape
                    .map(|output| output.shape.to_vec())
                    .unwrap_or_default(),
                parameters,
                findings,
                adds_gradients,
                overflows_from: is_f16.then(|| overflows_from(&node, &exponents)).flatten(),
            })
        });
        audited.collect()
    }
}
