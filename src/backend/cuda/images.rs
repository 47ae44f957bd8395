//! The kernels as `build.rs` embeds them: sources always, and compiled images where it found nvcc.

/// One file of kernels, compiled.
#[derive(Debug)]
#[allow(dead_code, reason = "without nvcc there are no images")]
pub(crate) struct Image {
    /// Which of [`SOURCES`] it was made of.
    pub(crate) file: &'static str,
    /// The compute capability that it is for: 10 · major + minor.
    pub(crate) arch: u32,
    pub(crate) kind: ImageKind,
    /// An ELF file, or text that ends with a zero byte. 16-byte aligned.
    pub(crate) bytes: &'static [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "without nvcc there are no images")]
pub(crate) enum ImageKind {
    /// Machine code, for devices of the same major capability and at least its minor one.
    Cubin,
    /// What the driver compiles by itself, for every device of at least its capability.
    Ptx,
}

impl Image {
    fn runs_on(&self, capability: u32) -> bool {
        capability >= self.arch && (self.kind == ImageKind::Ptx || capability / 10 == self.arch / 10)
    }
}

/// The images of all files for a device of this compute capability (10 · major + minor): machine code, and then what the driver compiles
/// by itself, in case it is too old for the former. A set that lacks a file is left out.
pub(super) fn sets_for(capability: u32) -> impl Iterator<Item = Vec<&'static [u8]>> {
    [ImageKind::Cubin, ImageKind::Ptx].into_iter().filter_map(move |kind| {
        let of_file = |file| IMAGES.iter().filter(move |image| image.file == file && image.kind == kind);
        SOURCES.iter().map(|(file, _)| best(of_file(*file), capability).map(|image| image.bytes)).collect()
    })
}

/// The newest that runs there; machine code before PTX.
fn best<'a>(images: impl Iterator<Item = &'a Image>, capability: u32) -> Option<&'a Image> {
    images.filter(|image| image.runs_on(capability)).max_by_key(|image| (image.kind == ImageKind::Cubin, image.arch))
}

/// The driver reads images as structs.
#[allow(dead_code, reason = "without nvcc there are no images")]
#[repr(C, align(16))]
struct Aligned<T>(T);

// SOURCES: names and texts of `kernels/*.cu`. HEADERS: of the `*.cuh` that they include, by these names. IMAGES.
include!(concat!(env!("OUT_DIR"), "/images.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_include_is_embedded() {
        let names: Vec<_> = HEADERS.iter().map(|(name, _)| *name).collect();
        for (file, text) in SOURCES.iter().chain(HEADERS) {
            for line in text.lines().filter_map(|line| line.strip_prefix("#include \"")) {
                assert!(names.contains(&line.trim_end_matches('"')), "{file} includes {line}");
            }
        }
        assert!(SOURCES.iter().any(|(_, text)| text.contains("wakekv_gather")));
    }

    #[test]
    fn the_best_image_is_the_newest_of_the_same_major_capability() {
        let image = |arch, kind| Image { file: "a.cu", arch, kind, bytes: &[] };
        let cubins = [80, 86, 89, 90, 100, 120].map(|arch| image(arch, ImageKind::Cubin));
        let images: Vec<_> = cubins.into_iter().chain([image(80, ImageKind::Ptx)]).collect();
        let picked = |capability| best(images.iter(), capability).map(|image| (image.arch, image.kind));
        for (capability, arch) in [(80, 80), (86, 86), (87, 86), (89, 89), (90, 90), (100, 100), (103, 100), (121, 120)]
        {
            assert_eq!(picked(capability), Some((arch, ImageKind::Cubin)), "{capability}");
        }
        assert_eq!(picked(110), Some((80, ImageKind::Ptx)));
        assert_eq!(picked(75), None);
    }

    #[test]
    fn a_set_has_an_image_of_every_file_or_is_left_out() {
        for capability in [75, 80, 86, 90, 110, 121] {
            assert!(sets_for(capability).all(|set| set.len() == SOURCES.len()));
        }
    }

    #[test]
    fn images_are_what_the_driver_takes() {
        for image in IMAGES {
            assert_eq!(image.bytes.as_ptr() as usize % 16, 0, "{}", image.file);
            match image.kind {
                ImageKind::Cubin => assert!(image.bytes.starts_with(b"\x7fELF"), "{}", image.file),
                ImageKind::Ptx => {
                    assert_eq!(image.bytes.iter().position(|&byte| byte == 0), Some(image.bytes.len() - 1))
                }
            }
        }
    }
}
