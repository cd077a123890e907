#include "optim/mapped_state.h"

#include "table/files/mapped_file.h"
#include "table/files/paths.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <numeric>
#include <string_view>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr std::string_view kRows = "_rows_";
constexpr int64_t kBlockBytes = int64_t(64) << 20;

void fill(MappedFile& file, int64_t rows, double initial) {
  uint64_t offset = 0;
  for (const MappedTensor& tensor : file.header().tensors) {
    const int64_t bytes = int64_t(tensor.bytes()), size = int64_t(c10::elementSize(tensor.dtype));
    if (initial != 0 && at::isFloatingType(tensor.dtype) && !tensor.sizes.empty() &&
        tensor.sizes[0] == rows) {
      const Tensor block =
          at::full({std::min(bytes, kBlockBytes) / size}, initial, at::TensorOptions(tensor.dtype));
      for (int64_t done = 0; done < bytes; done += kBlockBytes) {
        file.write(offset + uint64_t(done),
                   block.narrow(0, 0, std::min(bytes - done, kBlockBytes) / size));
      }
    }
    offset += tensor.bytes();
  }
}

} // namespace

bool is_in_file(const Tensor& table) {
  const MappedFile* const file = MappedFile::of(table);
  return file != nullptr && file->writable();
}

MappedState mapped_state(const Tensor& table, std::string rows_op,
                         const std::vector<const char*>& names, at::TensorList like,
                         double initial) {
  MappedFile& table_file = *MappedFile::of(table);
  const std::string kind = rows_op.substr(0, rows_op.size() - kRows.size()),
                    path = table_file.path() + "." + kind;
  // Widest elements first, so that each tensor is aligned at the end of the previous one.
  std::vector<size_t> order(like.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return like[a].itemsize() > like[b].itemsize(); });
  MappedHeader header{FileState::kBegun, kind, table_file.header().table, {}};
  for (const size_t i : order) {
    header.tensors.push_back({names[i], like[i].scalar_type(), like[i].sizes().vec()});
  }
  const bool existed = MappedFile::exists(path) && !MappedFile::remove_unfinished(path);
  std::shared_ptr<MappedFile> file;
  if (existed) {
    file = MappedFile::open(
        kind.c_str(), path, /*writable=*/true, table_file.recovered(),
        [&](const MappedFile& found) {
          TORCH_CHECK_VALUE(found.header().kind == kind && found.header().table == header.table,
                            kind, ": expected ", path, " as state of the table ", table_file.path(),
                            ", got that of another one: delete it to begin anew");
          TORCH_CHECK_VALUE(
              found.header().tensors == header.tensors, kind, ": expected ", path,
              " as state under the same options, got other tensors: delete it to begin anew");
        });
  } else {
    file = MappedFile::create(kind.c_str(), path, std::move(header));
    try {
      fill(*file, table.size(0), initial);
      file->flush();
    } catch (...) {
      paths::remove_file(path);
      throw;
    }
  }
  table_file.add_companion(file);
  const std::vector<Tensor> file_tensors = file->tensors();
  MappedState state{std::vector<Tensor>(like.size()), existed};
  for (size_t i = 0; i < order.size(); ++i) {
    state.tensors[order[i]] = file_tensors[i];
  }
  return state;
}

} // namespace xsoftmax
