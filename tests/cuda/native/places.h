// The line of Python that an operation comes from, and counts of what made the host wait there.
#pragma once
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/utils/pybind.h>
#include <frameobject.h>
#include "clocks.h"

namespace pretended {

// What a file is to a reader: torch's own lines are passed over, those of the package are what reports are about.
enum class Whose { torch, package, other };

inline Whose whose(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyCodeObject*, Whose>();
  auto found = known->find(code);
  if (found != known->end()) return found->second;
  Py_INCREF(code);  // its address stays its own
  const std::string file = PyUnicode_AsUTF8(code->co_filename);
  const bool passed = file.find("/torch/") != std::string::npos || file.find("/tests/cuda/") != std::string::npos ||
                      file.rfind("<", 0) == 0 || file.find("contextlib") != std::string::npos;
  auto kind = file.find("/hf_parallel/") != std::string::npos ? Whose::package : passed ? Whose::torch : Whose::other;
  return known->emplace(code, kind).first->second;
}

inline std::string line_of(PyFrameObject* frame) {
  PyCodeObject* code = PyFrame_GetCode(frame);
  std::string file = PyUnicode_AsUTF8(code->co_filename);
  Py_DECREF(code);
  size_t cut = file.size();
  for (int parts = 0; parts < 3 && cut != std::string::npos && cut > 0; parts++) cut = file.rfind('/', cut - 1);
  if (cut != std::string::npos) file = file.substr(cut + 1);
  return file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
}

// "file:line" of the innermost line that is not torch's; behind it the package's, where that is another one.
inline Place here() {
  static const Place outside = std::make_shared<std::string>("outside of Python");
  if (!Py_IsInitialized()) return outside;
  std::string found, package;
  {
    py::gil_scoped_acquire gil;
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      const auto kind = whose(code);
      Py_DECREF(code);
      if (kind != Whose::torch && found.empty()) found = line_of(frame);
      if (kind == Whose::package) package = line_of(frame);
      PyFrameObject* caller = package.empty() ? PyFrame_GetBack(frame) : nullptr;
      Py_DECREF(frame);
      frame = caller;
    }
  }
  if (!package.empty() && package != found) found += " | " + package;
  if (auto node = torch::autograd::get_current_node()) found = (found.empty() ? "" : found + ", ") + "backward of " + node->name();
  return std::make_shared<std::string>(found.empty() ? "a thread of torch" : found);
}

inline bool Clocks::is_planted(const char* kind) {
  if (planted_kind != kind) return false;
  if (!planted_where.empty() && here()->find(planted_where) == std::string::npos) return false;
  planted++;
  return true;
}

struct Counts {
  std::mutex lock;
  bool active = false;
  std::map<std::string, int64_t> waits;
  static Counts& get() {
    static auto* all = new Counts();
    return *all;
  }
  void wait(const std::string& kind) {
    if (!active) return;
    auto line = kind + " @ " + *here();
    std::lock_guard<std::mutex> held(lock);
    waits[line]++;
  }
};

}  // namespace pretended
