//! A walk out of recordings.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use burn::module::Module;

use super::lane::{FILES, Lane, Live, Spill};
use super::places::Places;
use super::script::{Script, Weights};
use super::{Walk, align};
use crate::execute::{device_of, values_of};
use crate::record::placeholders::Values;
use crate::record::trains;
use crate::tensors::Given;
use crate::{GraphError, Pass, Recording, Tensors};

/// A recording, its inputs, and what the original pass begins with where that is something else.
type Recorded<O, I> = (Recording<O>, I, Option<I>);

impl<O: Tensors> Walk<O> {
    /// With `folder`, of `count` batches one is in memory at a time. `differs` says which inputs the original
    /// pass begins with other values of, where it does.
    pub(super) fn collect<M: Module, I: Tensors>(
        model: &M,
        recorded: impl Iterator<Item = Result<Recorded<O, I>, GraphError>>,
        count: usize,
        folder: Option<&Path>,
        differs: &[bool],
    ) -> Result<Self, GraphError> {
        let mut scripts: Vec<Script> = Vec::new();
        let mut lanes = Vec::new();
        let mut forms = Vec::new();
        let mut device = None;
        let mut differing = HashSet::new();
        let mut forks = false;
        let mut spill = None;
        for (batch, recorded) in recorded.enumerate() {
            let (recording, inputs, original) = recorded?;
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
            let mut live: Live = ids.zip(given.tensors).collect();
            if let Some(original) = original {
                forks = true;
                let mut begins = Given::default();
                let _ = original.map_tensors(&mut begins);
                let inputs = graph.inputs.iter().zip(begins.tensors).zip(differs);
                for ((id, original), _) in inputs.filter(|(_, differs)| **differs) {
                    if let Some(replaced) = live.insert((*id, Pass::Original), original) {
                        live.insert((*id, Pass::Replaced), replaced);
                    }
                    differing.insert(*id);
                }
            }
            let same = scripts.iter().position(|script| {
                script.graph.operations == graph.operations
                    && script.graph.constants == graph.constants
            });
            let script = same.unwrap_or_else(|| {
                scripts.push(Script::new(graph));
                scripts.len() - 1
            });
            if let Some(folder) = folder
                && batch % count.div_ceil(FILES).max(1) == 0
            {
                spill = Some(Spill::new(folder)?);
            }
            let lane = match &mut spill {
                Some(spill) => spill.write(live)?,
                None => Lane::Memory(live),
            };
            lanes.push((script, lane));
            forms.push(recording.form);
        }
        let first = scripts.first().ok_or(GraphError::NoBatch)?;
        let device = device.ok_or(GraphError::NoDevice)?;
        let original = values_of(&Values::of(model), &first.graph)?;
        first.graph.check_devices(&original, &[], &device)?;
        Ok(Self {
            places: vec![Places::default(); lanes.len()],
            weights: Weights {
                original,
                replaced: HashMap::new(),
            },
            scripts,
            lanes,
            forms,
            device,
            forks,
            differing,
            touched: HashSet::new(),
            position: 0,
            shown: false,
            folder: folder.map(Path::to_path_buf),
        })
    }
}
