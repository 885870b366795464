//! A walk out of recordings.

use std::collections::{HashMap, HashSet};

use burn::module::Module;

use super::lane::{Lane, Live};
use super::script::{Script, Weights};
use super::{Walk, align};
use crate::execute::{device_of, values_of};
use crate::record::placeholders::Values;
use crate::record::trains;
use crate::tensors::Given;
use crate::{GraphError, Pass, Recording, Tensors};

impl<O: Tensors> Walk<O> {
    pub(super) fn collect<M: Module, I: Tensors>(
        model: &M,
        recorded: impl Iterator<Item = Result<(Recording<O>, I), GraphError>>,
    ) -> Result<Self, GraphError> {
        let mut scripts: Vec<Script> = Vec::new();
        let mut lanes = Vec::new();
        let mut forms = Vec::new();
        let mut device = None;
        for (batch, recorded) in recorded.enumerate() {
            let (recording, inputs) = recorded?;
            let mut given = Given::default();
            let _ = inputs.map_tensors(&mut given);
            if given.signature != recording.inputs {
                return Err(GraphError::Mismatch {
                    recorded: format!("inputs {:?}", recording.inputs),
                    found: format!("{:?} in batch {batch}", given.signature),
                });
            }
            if given.autodiff || trains(model) {
                return Err(GraphError::Training);
            }
            let here = match &device {
                Some(device) => device,
                None => device.insert(device_of(model, &given.tensors)?),
            };
            recording.graph.check_devices(&[], &given.tensors, here)?;
            let graph = align::canonical(recording.graph);
            if let Some(first) = scripts.first() {
                align::check(&first.graph, &graph, batch)?;
            }
            let ids = graph.inputs.iter().map(|id| (*id, Pass::Original));
            let live: Live = ids.zip(given.tensors).collect();
            let same = scripts.iter().position(|script| {
                script.graph.operations == graph.operations
                    && script.graph.constants == graph.constants
            });
            let script = same.unwrap_or_else(|| {
                scripts.push(Script::new(graph));
                scripts.len() - 1
            });
            lanes.push((script, Lane::Memory(live)));
            forms.push(recording.form);
        }
        let first = scripts.first().ok_or(GraphError::NoBatch)?;
        let device = device.ok_or(GraphError::NoDevice)?;
        let original = values_of(&Values::of(model), &first.graph)?;
        first.graph.check_devices(&original, &[], &device)?;
        Ok(Self {
            weights: Weights {
                original,
                replaced: HashMap::new(),
            },
            scripts,
            lanes,
            forms,
            device,
            forks: false,
            differing: HashSet::new(),
            touched: HashSet::new(),
            position: 0,
            shown: false,
            folder: None,
        })
    }
}
