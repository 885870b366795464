//! A model that is too large for memory, one block at a time.

use burn::module::Module;
use burn_lean_graph::{Results, Tensors};

use crate::driver::{Arrives, Part};
use crate::error::invalid;
use crate::{Compressed, OneShot, OneShotError, Report};

/// What is behind the last block of [`OneShot::compress_blocks`].
#[derive(Debug)]
pub struct Streamed<T> {
    /// What the blocks give for each batch: the compressed ones in [`Pass::Replaced`](burn_lean_graph::Pass::Replaced), and in
    /// [`Pass::Original`](burn_lean_graph::Pass::Original) the original ones, where the preset's target asks for these.
    pub results: Results<T>,
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
    /// and once more by the original blocks for [`Target::Original`](crate::Target::Original);
    /// [spilled](Self::spilling_to), of what a block makes of one batch. The result is that of
    /// [`compress`](Self::compress) for the whole model with the same blocks, where each block adds up its
    /// residual stream itself. Of one that hands on a summand and a residual apart, as `(hidden, residual)`, the
    /// sum is the next block's: with [`Target::Original`](crate::Target::Original) the layer in front of it then
    /// makes nothing good of what earlier blocks changed. Let such a block add them up at its end.
    ///
    /// With a [state folder](Self::with_state) each block has a folder in it, and all are called for
    /// again after an interruption, since what they give is needed; finished ones are not solved
    /// again, on another machine either, whose sums end in other last bits.
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
    /// Those of [`OneShotError`], with the block's name before a path; those of `blocks` and `store`;
    /// [`OneShotError::NothingToCompress`] without a block.
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
        let mut report = Report::default();
        let mut arrives = Arrives::Given(inputs.into_iter().collect());
        let blocks = blocks.into_iter();
        let of = blocks.len();
        for (number, block) in blocks.enumerate() {
            let (name, model) = block?;
            let under = |error: OneShotError| error.under(&name);
            let part = Part {
                name: Some(name.clone()),
                before: number,
                of: Some(of),
                arrives,
            };
            let (mut walk, own, weights) = self.run(&model, &forward, part).map_err(under)?;
            walk.finish().map_err(|error| under(error.into()))?;
            let (model, results) = walk
                .into_results(model)
                .map_err(|error| under(error.into()))?;
            arrives = Arrives::After(results);
            report.add(&own, &name);
            store(
                number,
                Compressed {
                    model,
                    report: own,
                    weights,
                },
            )?;
        }
        match arrives {
            Arrives::After(results) => Ok(Streamed { results, report }),
            Arrives::Given(_) => Err(OneShotError::NothingToCompress.into()),
        }
    }
}
