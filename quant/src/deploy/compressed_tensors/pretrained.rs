//! Folders as Transformers has them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use burn::module::Module;
use safetensors::tensor::SafeTensors;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::{Group, KEY, QuantizationConfig};
use super::save::{CompressedReport, Written};
use crate::QuantError;
use crate::deploy::safetensors_file::{FILES, FileError, write};

const CONFIG: &str = "config.json";
const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A folder with a model that Transformers and what else reads [compressed-tensors](super) loads:
/// `config.json` with the `quantization_config`, and the weights in one file or in several with their index.
///
/// A network there has its own names for the same layers. They are given with each
/// [`add`](Self::add), once with the whole model or block by block, so that a model need not be in memory
/// at once. Zeros of 2:4 are stored like other weights, as floats or as codes: a folder is no smaller for them,
/// readers of today know no layout without them.
///
/// # Readers
///
/// Transformers reads every grid that becomes codes here. vLLM reads those that it has kernels for, by its source of
/// September 2026 (nothing was run there); the grids by the names that presets of `burn-lean-oneshot` have:
///
/// | weights | inputs | names | vLLM |
/// |---|---|---|---|
/// | 4 bits, with zero points or without, groups of 32, 64, 128 or none | floats | `w4a16-g32` | yes |
/// | 8 bits without zero points, the same groups | floats | `w8a16` | yes |
/// | 8 bits with zero points, 2, 3, 5, 6 and 7 bits, other groups | floats | `w8a16-g32`, `w3a16` | depends on its version and on the GPU; versions before 2026 have 4 and 8 bits alone |
/// | 8 bits without zero points and groups | 8 bits, a scale for each token | `w8a8` | yes |
/// | 4 bits without zero points | likewise | `w4a8`, `w4a8-g32-sym` | on CPUs alone |
/// | 4 bits with zero points, 8 bits in groups or with zero points, other bits | likewise | `w4a8-g32`, `w8a8-g32` | no: "No compressed-tensors compatible scheme was found" |
///
/// A head in codes (`lm_head`) was not read by vLLM before March 2026: leave it as it is.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Device;
/// use burn_lean_quant::{QatConfig, WeightConfig};
/// use burn_lean_quant::deploy::{PretrainedFolder, load_pretrained};
///
/// let layers = |device: &Device| -> Vec<Linear> { vec![LinearConfig::new(64, 32).init(device)] };
/// let device = Device::flex();
/// let quantized = QatConfig::new().with_weight(WeightConfig::int(4)).with_activation(None);
/// let model = quantized.prepare(layers(&device.clone().autodiff()))?;
/// // `0.weight` in the model.
/// let names = |path: &str| format!("model.layers.{path}");
///
/// let folder = std::env::temp_dir().join(format!("compressed-{}", std::process::id()));
/// let mut writer = PretrainedFolder::create(&folder)?;
/// writer.add(&model, names)?;
/// let report = writer.finish(serde_json::json!({ "model_type": "mine" }))?;
/// assert_eq!(report.format, "pack-quantized");
/// assert_eq!(report.quantized, ["model.layers.0.weight"]);
///
/// let loaded = load_pretrained(layers(&device), &folder, names)?;
/// assert_eq!(loaded[0].weight.val().into_data(), model[0].weight.val().into_data());
/// std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PretrainedFolder {
    folder: PathBuf,
    shards: Vec<Shard>,
    groups: Vec<Group>,
    floats: Vec<String>,
    report: CompressedReport,
}

/// A file of weights.
#[derive(Debug)]
struct Shard {
    /// The name that it has now.
    file: String,
    /// Bytes of its tensors.
    bytes: u64,
    /// Their names.
    tensors: Vec<String>,
}

impl PretrainedFolder {
    /// A folder, which is made where it is not there.
    ///
    /// # Errors
    ///
    /// [`QuantError::File`] when it cannot be made, or has a configuration or weights already.
    pub fn create(folder: impl Into<PathBuf>) -> Result<Self, QuantError> {
        let folder = folder.into();
        let file = FileError::new(&folder);
        std::fs::create_dir_all(&folder).map_err(|error| file.write(error))?;
        let is_of_a_model =
            |name: &String| name == CONFIG || name == INDEX || name.ends_with(".safetensors");
        if let Some(name) = FILES.names(&folder)?.into_iter().find(is_of_a_model) {
            return Err(file.write(format!(
                "it has a `{name}` already, which would be of another model: name a folder without, or \
                 remove that"
            )));
        }
        Ok(Self {
            folder,
            shards: Vec::new(),
            groups: Vec::new(),
            floats: Vec::new(),
            report: CompressedReport::default(),
        })
    }

    /// Writes a model, or a part of one, prepared, converted or of floats, to a file of its own.
    ///
    /// `names` gives what the network there calls a tensor, from its path here; parameters of norms come as
    /// `weight` and `bias`. Codes of `a.weight` are `a.weight_packed`.
    ///
    /// # Errors
    ///
    /// Those of [`save_compressed_tensors`](super::save_compressed_tensors), and [`QuantError::File`] where
    /// two tensors get one name.
    pub fn add<M: Module>(
        &mut self,
        model: &M,
        names: impl Fn(&str) -> String,
    ) -> Result<(), QuantError> {
        let name = shard(self.shards.len() + 1, None);
        let path = self.folder.join(&name);
        let file = FileError::new(&path);
        let written = Written::of(model, &names, &file)?;
        let known = |name: &&String| self.shards.iter().any(|shard| shard.tensors.contains(name));
        if let Some(twice) = written.tensors.keys().find(known) {
            return Err(file.write(format!("two tensors of the model are named `{twice}`")));
        }
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        self.report.bytes += write(&written.tensors, metadata, &path)?;
        let bytes = written.tensors.values().map(|stored| stored.len() as u64);
        self.shards.push(Shard {
            file: name,
            bytes: bytes.sum(),
            tensors: written.tensors.keys().cloned().collect(),
        });
        for mut group in written.groups {
            let layers = std::mem::take(&mut group.targets);
            group.joins(&mut self.groups, layers);
        }
        self.floats.extend(written.floats);
        self.report.quantized.extend(written.report.quantized);
        self.report.left_out.extend(written.report.left_out);
        Ok(())
    }

    /// Names the files as their readers expect, and writes `config.json` last: a JSON object, what the network there
    /// needs to know, with the `quantization_config` of what was added in the place of the one it may have.
    ///
    /// # Errors
    ///
    /// [`QuantError::File`] when a file cannot be written, or `config` is no object. Nothing is lost by it:
    /// call it again.
    pub fn finish(&mut self, config: impl Serialize) -> Result<CompressedReport, QuantError> {
        let path = self.folder.join(CONFIG);
        let file = FileError::new(&path);
        let Ok(Value::Object(mut config)) = serde_json::to_value(config) else {
            return Err(file.write("the configuration is no JSON object"));
        };
        let quantization = QuantizationConfig::of(self.groups.clone(), self.floats.clone());
        self.report.format.clone_from(&quantization.format);
        config.remove(KEY);
        if !quantization.config_groups.is_empty() {
            let quantization =
                serde_json::to_value(quantization).map_err(|error| file.write(error))?;
            config.insert(KEY.into(), quantization);
        }
        let count = self.shards.len();
        let mut index = Index {
            metadata: Map::new(),
            weight_map: BTreeMap::new(),
        };
        for (number, one) in self.shards.iter_mut().enumerate() {
            let name = match count {
                1 => WHOLE.to_string(),
                _ => shard(number + 1, Some(count)),
            };
            // A call that failed may have renamed it.
            if one.file != name {
                let written = self.folder.join(&one.file);
                FILES.rename(&written, &self.folder.join(&name))?;
                one.file = name;
            }
            let places = one.tensors.iter();
            let places = places.map(|tensor| (tensor.clone(), one.file.clone()));
            index.weight_map.extend(places);
        }
        if count > 1 {
            let bytes: u64 = self.shards.iter().map(|shard| shard.bytes).sum();
            index.metadata.insert("total_size".into(), bytes.into());
            write_json(&self.folder.join(INDEX), &index)?;
        }
        write_json(&path, &config)?;
        Ok(self.report.clone())
    }
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), QuantError> {
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|error| FileError::new(path).write(error))?;
    FILES.write(path, (text + "\n").as_bytes())
}

fn shard(number: usize, of: Option<usize>) -> String {
    match of {
        Some(of) => format!("model-{number:05}-of-{of:05}.safetensors"),
        None => format!("model-{number:05}.safetensors"),
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Index {
    #[serde(default)]
    metadata: Map<String, Value>,
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// The configuration of a folder, of which none is one of floats, and the bytes of its files of weights.
pub(super) fn opened(folder: &Path) -> Result<(QuantizationConfig, Vec<Vec<u8>>), QuantError> {
    let mut config: Map<String, Value> = read_json(&folder.join(CONFIG))?;
    let file = FileError::new(folder);
    let config = match config.remove(KEY) {
        Some(found) => serde_json::from_value(found)
            .map_err(|error| file.read(format!("`{KEY}` of its `{CONFIG}`: {error}")))?,
        None => QuantizationConfig::of(Vec::new(), Vec::new()),
    };
    let (whole, index) = (folder.join(WHOLE), folder.join(INDEX));
    // Where there are both, Transformers reads the one file.
    let files = match whole.is_file() || !index.exists() {
        true => vec![FILES.read(&whole)?],
        false => shards(folder, &index)?,
    };
    Ok((config, files))
}

/// The files that an index names, which have each tensor once, and where it says.
fn shards(folder: &Path, index: &Path) -> Result<Vec<Vec<u8>>, QuantError> {
    let Index { weight_map, .. } = read_json::<Index>(index)?;
    let names: BTreeSet<&String> = weight_map.values().collect();
    let file = FileError::new(folder);
    // Names of files beside the index; no paths out of the folder.
    let is_path = |name: &str| Path::new(name).file_name() != Some(OsStr::new(name));
    if let Some(other) = names.iter().find(|name| is_path(name)) {
        return Err(file.read(format!("its index names `{other}`, which is no file of it")));
    }
    let mut found: HashMap<String, &String> = HashMap::new();
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        let path = folder.join(name);
        let bytes = FILES.read(&path)?;
        let header = SafeTensors::read_metadata(&bytes);
        let (_, header) = header.map_err(|error| FileError::new(&path).read(error))?;
        for tensor in header.offset_keys() {
            if let Some(other) = found.insert(tensor.clone(), name) {
                return Err(file.read(format!(
                    "both `{other}` and `{name}` have `{tensor}`: remove it from one of them, or download \
                     them again"
                )));
            }
        }
        files.push(bytes);
    }
    let mut places = weight_map.iter();
    match places.find(|(tensor, name)| found.get(*tensor) != Some(name)) {
        None => Ok(files),
        Some((tensor, name)) => Err(FileError::new(index).read(format!(
            "it says that `{tensor}` is in `{name}`, where it is not: index and files are of different models, \
             download them together"
        ))),
    }
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, QuantError> {
    let bytes = FILES.read(path)?;
    serde_json::from_slice(&bytes).map_err(|error| FileError::new(path).read(error))
}
