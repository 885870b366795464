//! A model that is too large for memory, one block at a time.

use burn::module::Module;
use burn_lean_graph::{Pass, Tensors};

use crate::driver::Part;
use crate::error::invalid;
use crate::{Compressed, OneShot, OneShotError, Report, Target};

/// What is behind the last block of [`OneShot::compress_blocks`].
#[derive(Debug, Clone)]
pub struct Streamed<T> {
    /// What the compressed blocks give, for each batch.
    pub outputs: Vec<T>,
    /// What the original blocks give; `None` where the preset's target does not ask for it.
    pub originals: Option<Vec<T>>,
    /// What was done, in all blocks; paths begin with the names of the blocks.
    pub report: Report,
}

impl OneShot<'_> {
    /// Compresses a model block by block, with one of them in memory.
    ///
    /// `blocks` loads them, each with a name for reports, errors and files: a block is made when the
    /// one before it is done and dropped. `forward` leads from what arrives at a block to what
    /// arrives at the next one; `inputs` arrive at the first. `store` gets each compressed block with
    /// its number, to write it to a file ([`Compressed::save`] and
    /// [`load_compressed`](crate::load_compressed), with the parameters' paths inside of the block).
    /// What `forward` needs besides the weights has to be in the block, as a table of rotations is:
    /// a recording takes no tensors from outside. [`skip`](crate::Preset::skip) names paths inside of
    /// every block.
    ///
    /// Memory is that of a block and its XᵀX, and of what arrives at a block for all batches: once,
    /// and once more by the original blocks for [`Target::Original`]. The result is that of
    /// [`compress`](Self::compress) for the whole model with the same blocks.
    ///
    /// With a [state folder](Self::with_state) each block has a folder in it, and all are called for
    /// again after an interruption, since what they give is needed; finished ones are not solved
    /// again.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_lean_oneshot::{OneShot, OneShotError, Preset};
    ///
    /// let device = Device::flex();
    /// let load = |number: usize| -> Result<(String, Linear), OneShotError> {
    ///     Ok((format!("layers.{number}"), LinearConfig::new(16, 16).init(&device)))
    /// };
    /// let x = Tensor::<2>::random([64, 16], Distribution::Default, &device);
    /// let done = OneShot::new(Preset::w4a16().with_group(8)).compress_blocks(
    ///     [x],
    ///     (0..3).map(load),
    ///     |layer, x| layer.forward(x),
    ///     |number, block| {
    ///         assert_eq!(block.weights[0].path, "weight");
    ///         // block.save(format!("{number}.safetensors"))
    ///         Ok(())
    ///     },
    /// )?;
    /// assert_eq!(done.report.layers[2].path, "layers.2.weight");
    /// # Ok::<(), OneShotError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`OneShotError`], with the block's name before a path; those of `blocks` and `store`.
    pub fn compress_blocks<M: Module, T: Tensors, E: From<OneShotError>>(
        mut self,
        inputs: impl IntoIterator<Item = T>,
        blocks: impl IntoIterator<Item = Result<(String, M), E>, IntoIter: ExactSizeIterator>,
        forward: impl Fn(&M, T) -> T,
        mut store: impl FnMut(usize, Compressed<M>) -> Result<(), E>,
    ) -> Result<Streamed<T>, E> {
        if self.preset.blocks.is_some() || self.group.is_some() {
            invalid("blocks", "named", "none: each module is a block")?;
        }
        let mut streamed = Streamed {
            outputs: inputs.into_iter().collect(),
            originals: None,
            report: Report::default(),
        };
        let blocks = blocks.into_iter();
        let of = blocks.len();
        for (number, block) in blocks.enumerate() {
            let (name, model) = block?;
            let Streamed {
                outputs,
                originals,
                mut report,
            } = streamed;
            let part = Part {
                name: Some(name.clone()),
                before: number,
                of: Some(of),
                originals,
            };
            let under = |error: OneShotError| error.under(&name);
            let (mut walk, own, weights) =
                self.run(&model, outputs, &forward, part).map_err(under)?;
            let mut results = |pass| {
                walk.finish()?;
                let results = (0..walk.batches()).map(|batch| walk.result(batch, pass));
                results
                    .collect::<Result<Vec<T>, _>>()
                    .map_err(OneShotError::from)
            };
            let outputs = results(Pass::Replaced).map_err(under)?;
            let originals = match self.preset.target {
                Target::OwnInputs => None,
                Target::Original => Some(results(Pass::Original).map_err(under)?),
            };
            report.add(&own, &name);
            streamed = Streamed {
                outputs,
                originals,
                report,
            };
            let model = walk.into_model(model);
            store(
                number,
                Compressed {
                    model,
                    report: own,
                    weights,
                },
            )?;
        }
        Ok(streamed)
    }
}
